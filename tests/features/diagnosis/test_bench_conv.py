"""medconv/features/diagnosis/bench_conv.py: a class of one's own beside nn.Conv at the sizes of our U-Net."""

import json

import pytest
from helpers import tiny

from medconv.features.diagnosis.bench_conv import table
from medconv.utils.exit_codes import DONE, USER

MINE = """
import torch
from torch import nn

class OneStride(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, out_channels, 1, 1, 1))  # no layout of a 2D weight
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding="same", bias=False)

    def forward(self, x):
        return (self.conv(x) + self.conv(x)) * self.scale[..., 0]
"""
SIZES = ["data.patch_size=[16,16]", "model.channels=[4,8]", "model.strides=[2]", "model.kernel_size=3"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_layer_of_a_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_class_in_the_current_folder_is_timed_layer_by_layer(folder, monkeypatch, capsys):
    name = "own_layer_of_a_test.OneStride"
    arguments = ["bench-conv", name, *SIZES, "trainer.accelerator=cpu", "--pairs", "1", "--json", "rows.json"]
    assert tiny.call(monkeypatch, *arguments) == DONE
    out = capsys.readouterr().out
    assert "all layers together: " in out and "what limits " in out and "checkpointed" in out
    rows = json.loads((folder / "rows.json").read_text())
    layers = [row for row in rows if "count" in row]
    # two convolutions in each of: stage 1, stage 2, decoder; of which only the last have equal sizes
    assert sum(row["count"] for row in layers) == 6
    assert any(", 1 channels at 16x16, batch 2" in row["case"] for row in layers)
    assert all(row["operators"][0] < row["operators"][1] for row in layers)
    assert "limit" in layers[0] and not any("limit" in row for row in layers[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transform"], "data.patch_size is needed, such as data.patch_size=[64,64,64], got null"),
        (
            ["transform", *SIZES, "data.spatial_dims=3"],
            "data.patch_size=[16, 16] has 2 axes, but data.spatial_dims=3",
        ),
        (["transform", *SIZES, "--pairs", "0"], "--pairs must be at least 1, got 0"),
        (["transform", *SIZES, "--batch", "0"], "--batch must be at least 1, got 0"),
        (["smooth", *SIZES], "leaves every layer an nn.Conv: nothing to time"),
        (["nowhere.MyConv", *SIZES], "conv._target_=nowhere.MyConv: "),
        (["transform", *SIZES, "--package", "nowhere"], "--package nowhere: cannot be imported"),
    ],
)
def test_wrong_arguments_are_one_error(arguments, message, folder, monkeypatch, capsys):
    assert tiny.call(monkeypatch, "bench-conv", *arguments) == USER
    error = capsys.readouterr().err
    assert message in error
    assert "Error executing job" not in error  # Hydra's own line


@pytest.mark.parametrize(("spread", "is_busy"), [(0.1, False), (1.0, True)])
def test_large_spreads_are_said(spread, is_busy):
    timing = {
        "case": "encoder.0, 1 channels at 8x8, batch 2",
        "seconds": 0.003,
        "ratio": 1.5,
        "spread": spread,
    }
    layer = {**timing, "count": 2, "library_seconds": 0.002, "kept_bytes": [0, 10**6], "operators": [6, 9]}
    remedy = {**timing, "variant": "checkpointed", "kept_bytes": 0, "reference_kept_bytes": 10**6}
    lines = table([{**layer, "precision": "32-true", "limit": "arithmetic"}, remedy])
    assert ("the machine is busy" in lines) == is_busy
    limit = "unknown, its times vary too much" if is_busy else "arithmetic"
    assert f"what limits encoder.0: {limit}" in lines
    assert "all layers together: 1.50 times nn.Conv; encoder.0 costs most" in lines
    assert "keeps 0.0 MB instead of 1.0" in lines
