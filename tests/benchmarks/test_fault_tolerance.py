"""scripts/benchmarks/fault_tolerance.py: what checkpoints and checks add to a training step."""

from helpers.benchmarks_harness import ROW_KEYS, benchmark


def test_fault_tolerance_is_timed_beside_a_training_step(monkeypatch, tmp_path):
    rows = benchmark(
        monkeypatch,
        tmp_path,
        "fault_tolerance",
        "--patch",
        "16",
        "16",
        "--features",
        "4",
        "8",
        "--pairs",
        "1",
    )
    assert len(rows) == 6 and rows[0]["variant"] == "forward and backward"
    assert all(set(row) >= ROW_KEYS and row["seconds"] > 0 for row in rows)
