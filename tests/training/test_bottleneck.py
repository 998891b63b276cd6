"""medconv/training/bottleneck.py: the sentence names the worst limit and a switch that addresses it."""

from typing import Any

import pytest

from medconv.config import DataConfig, PerfConfig, RunConfig, TrainerConfig
from medconv.performance.step_profiler import PHASES
from medconv.training.bottleneck import verdict


def shares(**measured: float) -> dict[str, float]:
    rest = 1 - sum(measured.values())
    return {**dict.fromkeys(PHASES, 0.0), "forward": rest / 3, "backward": 2 * rest / 3, **measured}


def config(**perf: Any) -> RunConfig:
    trainer = TrainerConfig(devices=1, precision="bf16-mixed", accelerator="cpu")
    return RunConfig(data=DataConfig(num_workers=2), trainer=trainer, perf=PerfConfig(**perf))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({"data_wait": 0.61}, "61% of the time waits for data: data.num_workers is 2 with 16 cores; try 16"),
        (
            {"data_wait": 0.2, "validation": 0.4},
            "40% of the time is validation: try a larger trainer.check_val_every_n_epoch",
        ),
        ({"copy_to_device": 0.15}, "15% of the time copies batches to the device"),
        ({"augmentation": 0.3}, "30% of the time is augmentation on the device"),
        (
            {"logging": 0.2},
            "20% of the time is logging and callbacks: try a larger trainer.log_every_n_steps",
        ),
        ({"data_wait": 0.05}, "95% of the time is the network itself: try perf.compile=true in long runs"),
    ],
)
def test_the_sentence_names_the_worst_bottleneck_and_its_setting(
    measured: dict[str, float], expected: str
) -> None:
    sentence = verdict(shares(**measured), config(), cores=16)
    assert sentence is not None and sentence.startswith(expected)


def test_the_advice_is_a_setting_not_yet_used() -> None:
    assert "perf.channels_last=true" in str(verdict(shares(), config(channels_last=False), 2))
    assert "perf.activation_checkpointing=none" in str(
        verdict(shares(), config(activation_checkpointing="blocks"), 2)
    )
    assert "more devices" in str(verdict(shares(), config(compile=True), 2))


def test_more_workers_than_cores_are_not_advised() -> None:
    assert "try augmentation=none" in str(verdict(shares(data_wait=0.5), config(), cores=2))


def test_no_verdict_without_a_measurement() -> None:
    assert verdict({}, config(), 2) is None
