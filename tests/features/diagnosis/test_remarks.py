"""medconv/features/diagnosis/remarks.py: a dear convolution is named at the start of a run, a plain one costs nothing; the
sentence at its end names the worst limit and a switch that addresses it.
"""

import json
import logging
import sys
from dataclasses import replace

import pytest
from helpers import tiny

from medconv.config import DataConfig, PerfConfig, RunConfig, TrainerConfig
from medconv.features.diagnosis import remarks
from medconv.features.diagnosis.remarks import verdict
from medconv.performance.step_profiler import PHASES
from medconv.training import run
from medconv.training.run_dir import RunDir

DEAR = """
from torch import nn


class Twenty(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        return sum(self.conv(x) for _ in range(20)) / 20


def twenty_times(conv):
    return Twenty(conv)


def broken(conv):
    raise RuntimeError("no such layer")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "dear_layer_of_a_test.py").write_text(DEAR)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "dear_layer_of_a_test"
    sys.modules.pop("dear_layer_of_a_test", None)


def test_a_run_says_what_its_layers_cost_and_measures_it_once(own, tmp_path, caplog):
    dataset = tiny.write_dataset(tmp_path / "data")
    caplog.set_level(logging.INFO)
    conv = [f"conv._target_={own}.twenty_times", "conv=none"]
    summary = tiny.train(dataset, tmp_path / "run", *conv)
    assert summary["conv_price"]["ratio"] > 2
    assert summary["conv_price"]["layer"].startswith(("encoder", "decoder"))
    assert "times nn.Conv's time, forward and backward; " in caplog.text
    (kept,) = (tmp_path / "prepared" / "conv_price").glob("*.json")
    known = json.loads(kept.read_text())
    kept.write_text(json.dumps({**known, "ratio": 7.5}))
    again = tiny.train(dataset, tmp_path / "again", *conv)
    assert again["conv_price"]["ratio"] == 7.5


@pytest.mark.parametrize("conv", ["none", "smooth"])
def test_plain_layers_are_not_measured(conv, tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data")
    summary = tiny.train(dataset, tmp_path / "run", f"conv={conv}")
    assert summary["conv_price"] is None
    assert not (tmp_path / "prepared" / "conv_price").exists()


def test_a_kernel_that_is_computed_in_place_is_measured(tmp_path):
    """`install` changes the class of the layer that it gets, which is then no `nn.Conv` either."""
    dataset = tiny.write_dataset(tmp_path / "data")
    summary = tiny.train(dataset, tmp_path / "run", "conv=basis")
    assert summary["conv_price"]["ratio"] > 0


def test_another_convolution_of_the_same_network_is_measured_anew(own, tmp_path, monkeypatch):
    monkeypatch.setattr(remarks, "_SECONDS", 0.0)
    folder = RunDir(tmp_path / "run")
    config, prepared = run.prepare(tiny.checked(tiny.write_dataset(tmp_path / "data"), "conv=basis"), folder)
    resolved = run.resolve(config, prepared, folder)
    assert remarks.price(resolved) is not None
    dear = replace(resolved, conv={"_target_": f"{own}.twenty_times", "_partial_": True})
    assert remarks.price(dear) is not None
    assert len([*(tmp_path / "prepared" / "conv_price").glob("*.json")]) == 2


def test_a_measurement_that_fails_is_a_warning(own, tmp_path, caplog):
    dataset = tiny.write_dataset(tmp_path / "data")
    folder = RunDir(tmp_path / "run")
    checked = tiny.checked(dataset)
    config, prepared = run.prepare(checked, folder)
    resolved = run.resolve(config, prepared, folder)
    broken = replace(resolved, conv={"_target_": f"{own}.broken", "_partial_": True})
    assert remarks.price(broken) is None
    assert "conv: cannot be timed beside nn.Conv: no such layer" in caplog.text


def shares(**measured):
    rest = 1 - sum(measured.values())
    return {**dict.fromkeys(PHASES, 0.0), "forward": rest / 3, "backward": 2 * rest / 3, **measured}


def config(**perf):
    trainer = TrainerConfig(devices=1, precision="bf16-mixed", accelerator="cpu")
    return RunConfig(data=DataConfig(num_workers=2), trainer=trainer, perf=PerfConfig(**perf))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (
            {"data_wait": 0.61},
            "61 % of the time was spent waiting for data: data.num_workers is 2 with 16 cores; try 16",
        ),
        (
            {"data_wait": 0.2, "validation": 0.4},
            "40 % of the time was spent on validation: try a larger trainer.check_val_every_n_epoch",
        ),
        ({"copy_to_device": 0.15}, "15 % of the time was spent copying batches to the device"),
        ({"augmentation": 0.3}, "30 % of the time was spent on augmentation on the device"),
        (
            {"logging": 0.2},
            "20 % of the time was spent on logging and callbacks: try a larger trainer.log_every_n_steps",
        ),
        (
            {"data_wait": 0.05},
            "95 % of the time was spent in the network itself: try perf.compile=true in long runs",
        ),
    ],
)
def test_the_sentence_names_the_worst_bottleneck_and_its_setting(measured, expected):
    sentence = verdict(shares(**measured), config(), cores=16)
    assert sentence is not None and sentence.startswith(expected)


def test_the_advice_is_a_setting_not_yet_used():
    assert "perf.channels_last=true" in str(verdict(shares(), config(channels_last=False), 2))
    assert "perf.activation_checkpointing=none" in str(
        verdict(shares(), config(activation_checkpointing="blocks"), 2)
    )
    assert "more devices" in str(verdict(shares(), config(compile=True), 2))


def test_more_workers_than_cores_are_not_advised():
    assert "try augmentation=none" in str(verdict(shares(data_wait=0.5), config(), cores=2))


def test_the_processes_of_a_machine_share_its_cores():
    of_two = replace(config(), trainer=TrainerConfig(devices=2, precision="bf16-mixed", accelerator="cpu"))
    assert str(verdict(shares(data_wait=0.5), of_two, cores=16)).endswith("with 16 cores; try 8")


def test_no_verdict_without_a_measurement():
    assert verdict({}, config(), 2) is None
