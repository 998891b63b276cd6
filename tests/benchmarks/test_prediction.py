"""scripts/benchmarks/prediction.py: cases one after another, and streamed."""

from helpers import tiny
from helpers.benchmarks_harness import ROW_KEYS, benchmark


def test_streamed_prediction_is_timed_beside_serial_prediction(monkeypatch, tmp_path):
    dataset = tiny.write_dataset(tmp_path / "tiny")
    tiny.train(dataset, tmp_path / "run", "trainer.max_steps=1")
    arguments = [
        "--checkpoint",
        str(tmp_path / "run/checkpoints/last.ckpt"),
        "--input",
        str(dataset / "imagesTr"),
    ]
    rows = benchmark(monkeypatch, tmp_path, "prediction", *arguments, "--cases", "3", "--pairs", "1")
    assert [row["variant"] for row in rows] == [
        "one after another",
        "streamed, 1 loading",
        "streamed, 2 loading",
    ]
    assert all(set(row) >= ROW_KEYS and row["seconds_per_case"] == row["seconds"] / 3 for row in rows)
