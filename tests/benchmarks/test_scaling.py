"""scripts/benchmarks/scaling.py: the samples per second of the real command, and efficiency."""

import pytest
from helpers import tiny
from helpers.benchmarks_harness import benchmark, commands_in_this_process

from benchmarks import scaling


def test_scaling_runs_the_real_command(monkeypatch, tmp_path):
    commands_in_this_process(monkeypatch)
    dataset = tiny.write_dataset(tmp_path / "tiny")
    settings = [o for o in tiny.overrides(dataset) if "max_steps" not in o]
    arguments = ["scaling", "--devices", "1", "--pairs", "1", "--steps", "2", "--overrides", *settings]
    (row,) = benchmark(monkeypatch, tmp_path, *arguments)
    assert row["variant"] == "trainer.devices=1" and row["efficiency"] == 1
    assert row["samples_per_second"] > 0


def test_efficiency_is_the_speed_up_over_the_number_of_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "_speed", lambda devices, folder, options: {1: 10.0, 2: 15.0}[devices])
    one, two = benchmark(monkeypatch, tmp_path, "scaling", "--pairs", "2")
    assert (one["efficiency"], two["efficiency"]) == (1, pytest.approx(0.75))
    assert (two["variant"], two["samples_per_second"]) == ("trainer.devices=2", 15.0)
