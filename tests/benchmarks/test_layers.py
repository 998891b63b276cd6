"""scripts/benchmarks/layers.py: our layers beside the library's."""

from helpers.benchmarks_harness import benchmark


def test_our_layers_are_timed_beside_those_of_torch(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.layers.STAGES", [(32, (4, 4, 4))])
    monkeypatch.setattr("benchmarks.layers.CLASSES", [(3, (4, 4, 4))])
    monkeypatch.setattr("benchmarks.layers.KERNELS", [(4, (3, 3, 1), (16, 16, 5))])
    monkeypatch.setattr("benchmarks.layers.UPSAMPLING", [(8, 4, (2, 2, 1), (8, 8, 5))])
    rows = benchmark(monkeypatch, tmp_path, "layers", "--pairs", "2")
    variants = {(row["benchmark"], row["variant"]) for row in rows}
    assert {("norm", "ours, channels-last"), ("depthwise", "ours, blocks of 16")} <= variants
    assert {("kernel", "ours"), ("upsampling", "ours")} <= variants
    assert all(
        row["seconds"] > 0 and (row["ratio"] == 1 or row["variant"] != row["reference"]) for row in rows
    )
