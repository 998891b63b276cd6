"""The benchmarks of the step and of scaling, at tiny sizes: their rows, and that what they count is right."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny
from helpers.benchmarks_harness import benchmark, commands_in_this_process, peers_are_forked
from torch import nn

from benchmark import main
from benchmarks import scaling
from benchmarks.memory import LiveTensors, step_memory


def test_every_switch_and_preset_stands_beside_the_reference_and_the_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_nnunet_needs_its_own_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_sizes = ["--patch", "8", "8", "8", "--features", "4", "8", "8", "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "step", *tiny_sizes, "--peers", "nnunet"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1 and "--peers nnunet needs --nnunet-python" in capsys.readouterr().err


def test_scaling_runs_the_real_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands_in_this_process(monkeypatch)
    dataset = tiny.write_dataset(tmp_path / "tiny")
    settings = [o for o in tiny.overrides(dataset) if "max_steps" not in o]
    arguments = ["scaling", "--devices", "1", "--pairs", "1", "--steps", "2", "--overrides", *settings]
    (row,) = benchmark(monkeypatch, tmp_path, *arguments)
    assert row["variant"] == "trainer.devices=1" and row["efficiency"] == 1
    assert row["samples_per_second"] > 0


def test_efficiency_is_the_speed_up_over_the_number_of_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scaling, "_speed", lambda devices, folder, options: {1: 10.0, 2: 15.0}[devices])
    one, two = benchmark(monkeypatch, tmp_path, "scaling", "--pairs", "2")
    assert (one["efficiency"], two["efficiency"]) == (1, pytest.approx(0.75))
    assert (two["variant"], two["samples_per_second"]) == ("trainer.devices=2", 15.0)


def test_live_tensors_are_counted_to_the_byte() -> None:
    weight = torch.ones(100, requires_grad=True)
    with LiveTensors() as live:
        kept = weight * 2  # 400 bytes
        view = kept[:50]
        gone = torch.zeros(1000)
        del gone
    assert live.bytes_alive() == 400
    assert live.peak_bytes == 4400
    del kept
    assert live.bytes_alive() == 400
    del view
    assert live.bytes_alive() == 0


def test_saved_bytes_are_what_a_backward_pass_needs() -> None:
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(16, 8)
    forward = lambda: layer(x).relu().sum()  # noqa: E731
    found = step_memory(forward, lambda: forward().backward(), x.device)
    assert found["saved_bytes"] == 16 * 8 * 4 + 4  # the result of the relu, and the loss
    assert found["peak_bytes"] > found["saved_bytes"]


def test_layers_stand_beside_the_librarys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.layers.STAGES", [(32, (4, 4, 4))])
    rows = benchmark(monkeypatch, tmp_path, "layers", "--pairs", "2")
    variants = {(row["benchmark"], row["variant"]) for row in rows}
    assert {("norm", "ours, channels-last"), ("depthwise", "ours, blocks of 16")} <= variants
    assert all(
        row["seconds"] > 0 and (row["ratio"] == 1 or row["variant"] != row["reference"]) for row in rows
    )
