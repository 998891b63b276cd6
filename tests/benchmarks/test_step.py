"""scripts/benchmarks/step.py at tiny sizes: presets, switches and peers in one run."""

import pytest
from helpers.benchmarks_harness import benchmark, peers_are_forked


@pytest.mark.slow
def test_presets_and_the_peer_are_timed_beside_the_reference(monkeypatch, tmp_path, capsys):
    peers_are_forked(monkeypatch)
    sizes = ["--patch", "8", "8", "8", "--features", "4", "8", "8", "--pairs", "2"]
    rows = {row["variant"]: row for row in benchmark(monkeypatch, tmp_path, "step", *sizes)}
    presets = {
        "perf=reference",
        "perf=fast",
        "perf=memory (activation_checkpointing=blocks)",
        "perf=autotune",
    }
    assert presets | {"MONAI DynUNet, plain Lightning", "peers' network, perf=fast"} <= set(rows)
    assert rows["perf=reference"]["ratio"] == 1 and rows["perf=reference"]["loss_difference"] == 0
    for name, row in rows.items():
        assert row["seconds"] > 0 and row["times_as_fast"] == pytest.approx(1 / row["ratio"])
        if "DynUNet" not in name:
            assert row["loss_difference"] < 0.03 and 0 < row["saved_bytes"] <= row["peak_bytes"]
    assert (
        rows["perf=memory (activation_checkpointing=blocks)"]["saved_bytes"]
        < rows["perf=fast"]["saved_bytes"]
    )
    assert rows["perf=autotune"]["choice"]
    assert "| perf=reference |" in capsys.readouterr().out
