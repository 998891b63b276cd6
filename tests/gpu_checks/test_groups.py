"""The groups of scripts/gpu_check.py in their tiny form: every part runs, and its figures hold where they do not
tell of speed. All for the night: the benchmarks that they read, and the trainings, predictions and exports that they
start, have tests of their own.
"""

from unittest.mock import ANY

import pytest
from helpers import gpu_parts
from pytest import approx

SMOKE = {"resume": {"largest difference of a loss": 0}, "predict": {"voxels that differ": 0, "cases": 1}}
# both sides of a comparison are the CPU
CORRECTNESS = {
    "same-as-cpu": {"largest difference": 0},
    "muon": {"error": 0, "change of a skipped step": 0},
    "no-waits": {"where": ANY, "forward": ANY, "optimizer": ANY},
}
SPEED = {
    "step-small": {"perf=fast, seconds": ANY},
    "images-per-second": {"share of the bf16 peak": approx(0.05, abs=0.05)},
}
LAYERS = {"convolutions-price": {"basis, times nn.Conv": ANY, "acs, times nn.Conv": ANY}}
MEMORY = {"memory-estimate": {"fp32": approx(1, abs=0.3)}}
DATA = {"loader": {"ours": ANY, "MONAI": ANY}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "figures"),
    [
        ("smoke", SMOKE),
        ("correctness", CORRECTNESS),
        ("speed", SPEED),
        ("layers", LAYERS),
        ("memory", MEMORY),
        ("data", DATA),
        ("distributed", {}),
    ],
)
def test_every_part_runs(group, figures, monkeypatch, tmp_path):
    parts = gpu_parts.tiny(monkeypatch, tmp_path, group)
    for name, expected in figures.items():
        measured = parts[name]["figures"]
        assert {key: measured[key] for key in expected} == expected
    if group == "distributed":
        for name in ("ddp-two", "tensor-parallel", "lost-machine"):
            assert "needs two" in parts[name]["reason"]
