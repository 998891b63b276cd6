"""scripts/benchmarks/convs.py and conv_*.py: our convolutions beside those of torch, and their predicted costs."""

import numpy as np
import pytest
from helpers.benchmarks_harness import ROW_KEYS, benchmark

from benchmarks import conv_layers, convs


@pytest.mark.slow
def test_our_convolutions_are_timed_beside_those_of_torch(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(convs, "STAGES", {2: [(8, (8, 8))], 3: [(8, (4, 4, 4)), (16, (2, 2, 2))]})
    rows = benchmark(monkeypatch, tmp_path, "convs", "--pairs", "2", "--parts", "stages", "backward")
    assert all(set(row) >= ROW_KEYS for row in rows)
    stages = [row for row in rows if row["benchmark"] == "stages"]
    assert {row["variant"] for row in stages} >= {
        "nn.Conv",
        "transform",
        "basis",
        "mirror",
        "acs",
        "unfold and einsum",
    }
    for row in stages:
        assert row["ratio"] > 0 and (row["variant"] != "nn.Conv" or row["ratio"] == 1)
    means = {(r["case"], r["variant"]): r["ratio"] for r in stages if "geometric mean" in r["case"]}
    single = [
        r["ratio"]
        for r in stages
        if r["variant"] == "basis" and r["case"].startswith("3D training step, ") and "mean" not in r["case"]
    ]
    assert means["3D training step, geometric mean of 2 stages", "basis"] == pytest.approx(
        np.prod(single) ** 0.5
    )
    calls = {row["variant"]: row["convolution_calls"] for row in rows if row["benchmark"] == "backward"}
    assert calls["nn.Conv"] == calls["one call (ours)"] == 1 and calls["torch.nn.grad, two calls"] == 2
    assert "| nn.Conv |" in capsys.readouterr().out


def test_naive_code_computes_the_same_as_torch():
    import torch
    from torch import nn

    for conv, size in (
        (nn.Conv2d(3, 4, 3, padding=1, bias=False), (5, 6)),
        (nn.Conv3d(2, 3, 3, padding=1, bias=False), (4, 3, 5)),
    ):
        x = torch.randn(2, conv.in_channels, *size)
        torch.testing.assert_close(conv_layers.Unfolded(conv)(x), conv(x), rtol=1e-4, atol=1e-5)
