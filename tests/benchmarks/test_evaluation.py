"""scripts/benchmarks/evaluation.py: our metrics beside MONAI's."""

from helpers import tiny
from helpers.benchmarks_harness import ROW_KEYS, benchmark


def test_our_metrics_are_timed_beside_those_of_monai(monkeypatch, tmp_path):
    labels = tiny.write_dataset(tmp_path / "tiny") / "labelsTr"
    arguments = ["--labels", str(labels), "--pairs", "1", "--shape", "24", "20", "16"]
    rows = benchmark(monkeypatch, tmp_path, "evaluation", *arguments)
    assert len(rows) == 4 and all(set(row) >= ROW_KEYS for row in rows)
    assert all(row["furthest_apart"] < 1e-4 for row in rows)
