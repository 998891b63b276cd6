"""medconv/features/diagnosis/bench_conv.py: convolutions timed in turn."""

import json
import time

import pytest
import torch
from helpers import tiny
from helpers.benchmarks_harness import ManualClock

from medconv.features.diagnosis import alternating, command
from medconv.features.diagnosis.alternating import alternate
from medconv.features.diagnosis.bench_conv import table
from medconv.utils.exit_codes import DONE, USER

MINE = """
import torch
from torch import nn

class Volumes(nn.Conv3d):
    pass

def nothing(conv):
    return nn.Identity()

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
        (["transform", *SIZES, "data.spacing_mm=[1]"], "data.spacing_mm needs 2 positive numbers"),
        (
            ["transform", *SIZES, "plan.strides=[32]"],
            "data.patch_size must be divisible by (32, 32) (plan.strides)",
        ),
        (["transform", *SIZES, "--pairs", "0"], "--pairs must be at least 1, got 0"),
        (["transform", *SIZES, "--batch", "0"], "--batch must be at least 1, got 0"),
        (["smooth", *SIZES], "leaves every layer an nn.Conv: nothing to time"),
        (
            ["own_layer_of_a_test.Volumes", *SIZES],
            "conv: with it, model cannot take data.patch_size=[16, 16]",
        ),
        (
            ["own_layer_of_a_test.nothing", *SIZES],
            "conv: with it, model cannot take data.patch_size=[16, 16]",
        ),
        (["nowhere.MyConv", *SIZES], "conv._target_=nowhere.MyConv: "),
        (["transform", *SIZES, "--package", "nowhere"], "--package nowhere: cannot be imported"),
    ],
)
def test_wrong_arguments_are_one_error(arguments, message, folder, monkeypatch, capsys):
    assert tiny.call(monkeypatch, "bench-conv", *arguments) == USER
    error = capsys.readouterr().err
    assert message in error
    assert "Error executing job" not in error  # Hydra's own line


def test_a_sweep_keeps_the_rows_of_all_its_convolutions(folder, monkeypatch):
    settings = [*SIZES, "trainer.accelerator=cpu", "--pairs", "1", "--json", "rows.json"]
    assert tiny.call(monkeypatch, "bench-conv", "basis", "-m", "conv.bank=jet,lines", *settings) == DONE
    rows = json.loads((folder / "rows.json").read_text())
    layers = [row for row in rows if "count" in row]  # not the remedies of the slowest one
    banks = [row["overrides"][1] for row in layers if row["case"].startswith("encoder.0.0,")]
    assert banks == ["conv.bank=jet", "conv.bank=lines"]


def test_stages_are_those_of_the_plan_in_the_config(folder, monkeypatch, capsys):
    plan = ["plan.strides=[[1,2],[2,2]]", "plan.channels=[4,6,8]", "plan.kernel_sizes=[3,[1,3],3]"]
    arguments = ["basis", "data.patch_size=[16,16]", *plan, "trainer.accelerator=cpu", "--pairs", "1"]
    assert tiny.call(monkeypatch, "bench-conv", *arguments) == DONE
    out = capsys.readouterr().out
    for layer in ("encoder.0.3, 4 channels at 16x16", "encoder.1.0, 6 channels at 16x8", "encoder.2.0, 8 "):
        assert layer in out


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


def test_keys_are_left_for_hydra():
    arguments = ["mine.MyConv", "model=segresnet", "data.patch_size=[8,8]", "--pairs", "3"]
    options = command.parser().parse_args(arguments)
    assert (options.conv, options.pairs, options.compile) == ("mine.MyConv", 3, False)
    assert options.overrides == ["model=segresnet", "data.patch_size=[8,8]"]


def test_variants_alternate_and_get_ratios_to_the_reference():
    order = []
    clock = ManualClock()
    variants = {
        "a": lambda: (order.append("a"), clock.wait(2.0)),
        "b": lambda: (order.append("b"), clock.wait(6.0)),
    }
    timings = alternate(variants, "a", pairs=10, warm_up=1, clock=clock)
    assert order[:2] == ["a", "b"] and all(set(order[i : i + 2]) == {"a", "b"} for i in range(2, 22, 2))
    assert len({tuple(order[i : i + 2]) for i in range(2, 22, 2)}) == 2  # both orders occur
    assert timings["a"] == {"seconds": 2.0, "ratio": 1.0, "spread": 0.0}
    assert timings["b"] == {"seconds": 6.0, "ratio": 3.0, "spread": 0.0}


@pytest.mark.parametrize(("threads", "clock"), [(1, time.process_time), (2, time.perf_counter)])
def test_other_work_on_the_machine_does_not_count_for_one_thread(threads, clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert alternating.computing_clock() is clock


def test_several_calls_between_two_waits_give_the_seconds_of_one():
    clock = ManualClock()
    calls = []
    variants = {"a": lambda: (calls.append("a"), clock.wait(2.0))}
    assert alternate(variants, "a", pairs=3, warm_up=1, clock=clock, calls=10)["a"]["seconds"] == 2.0
    assert len(calls) == 31
