"""medconv/training/callbacks/weight_averaging.py: the mean of the weights, which training ignores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from lightning import Callback
from torch import nn

from medconv.inference.load import load
from medconv.training.callbacks.weight_averaging import AverageWeights, _Mean, move
from medconv.utils import checkpoint_io

STEPS = [
    "trainer.max_steps=8",
    "data.samples_per_epoch=8",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "schedule.patch=whole",  # which a shorter run reaches earlier
    "weight_averaging.begin=0",
]
SPY = "+callbacks.spy._target_=tests.training.callbacks.test_weight_averaging.Weights"


class Weights(Callback):
    """Writes the training's own weights after every step."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.save(pl_module.network.state_dict(), self.path / f"{trainer.global_step}.pt")


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The last checkpoint of a run with a mean."""
    folder = tmp_path_factory.mktemp("whole")
    tiny.train(dataset, folder, *STEPS)
    return folder / "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def half(dataset, tmp_path_factory):
    """That of its first half."""
    folder = tmp_path_factory.mktemp("half")
    tiny.train(dataset, folder, *STEPS, "trainer.max_steps=4")
    return folder / "checkpoints/last.ckpt"


def state(path, key="state_dict"):
    return {name.removeprefix("network."): value for name, value in checkpoint_io.read(path)[key].items()}


@pytest.mark.parametrize(("power", "every"), [(2.0, 1), (0.0, 1), (1.0, 3)])
def test_the_mean_is_weighted_by_the_power_of_the_step(dataset, tmp_path, power, every):
    """Each update has the weight (power + 1) / (its number + power); with power 0 all have the same share."""
    spy = [SPY, f"+callbacks.spy.path={tmp_path}"]
    settings = [f"weight_averaging.power={power}", f"weight_averaging.every={every}"]
    tiny.train(dataset, tmp_path / "run", *STEPS, *spy, *settings)
    seen = [torch.load(tmp_path / f"{step}.pt", weights_only=True) for step in range(1, 9, every)]
    shares = [1.0]
    for count in range(1, len(seen)):
        newest = (power + 1) / (count + power + 1)
        shares = [*(share * (1 - newest) for share in shares), newest]
    if power == 0:
        assert shares == pytest.approx([1 / len(seen)] * len(seen))
    averaged = state(tmp_path / "run/checkpoints/last.ckpt")
    for name, value in averaged.items():
        if value.is_floating_point():
            expected = sum(share * weights[name] for share, weights in zip(shares, seen, strict=True))
            torch.testing.assert_close(value, expected, msg=name)
    own = state(tmp_path / "run/checkpoints/last.ckpt", "current_model_state")
    last = torch.load(tmp_path / "8.pt", weights_only=True)
    assert all(torch.equal(own[name], value) for name, value in last.items())


def test_with_power_2_half_of_the_mean_comes_from_the_last_fifth():
    callback, mean = AverageWeights(power=2.0, begin=0), [torch.zeros(1)]
    for count in range(1, 1000):
        callback._update(mean, [torch.tensor([float(count >= 794)])], count)
    assert float(mean[0]) == pytest.approx(0.5, abs=0.01)


def test_steps_before_begin_are_left_out(dataset, tmp_path):
    spy = [SPY, f"+callbacks.spy.path={tmp_path}"]
    settings = ["weight_averaging.begin=6", "weight_averaging.power=0", "weight_averaging.every=1"]
    tiny.train(dataset, tmp_path / "run", *STEPS, *spy, *settings)
    seen = [torch.load(tmp_path / f"{step}.pt", weights_only=True) for step in (7, 8)]
    for name, value in state(tmp_path / "run/checkpoints/last.ckpt").items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (seen[0][name] + seen[1][name]) / 2, msg=name)
    tiny.train(dataset, tmp_path / "short", *STEPS, "weight_averaging.begin=300")
    short = tmp_path / "short/checkpoints/last.ckpt"
    own = state(short, "current_model_state")
    assert all(torch.equal(value, own[name]) for name, value in state(short).items())


def test_averaging_does_not_change_the_training(dataset, tmp_path):
    begin = {"polynomial": STEPS[-1:], "none": []}
    for name in begin:
        tiny.train(dataset, tmp_path / name, *STEPS[:-1], f"weight_averaging={name}", *begin[name])
    assert tiny.losses(tmp_path / "polynomial") == tiny.losses(tmp_path / "none")
    own, plain = (tmp_path / name / "checkpoints/last.ckpt" for name in ("polynomial", "none"))
    plain_state, own_state = state(plain), state(own, "current_model_state")
    assert all(torch.equal(own_state[name], value) for name, value in plain_state.items())
    assert any(not torch.equal(state(own)[name], value) for name, value in plain_state.items())
    assert "current_model_state" not in checkpoint_io.read(plain)


def test_a_resumed_run_has_the_mean_of_an_uninterrupted_one(whole, half, dataset, tmp_path):
    tiny.train(dataset, tmp_path / "resumed", *STEPS, f"run.resume={half}")
    for key in ("state_dict", "current_model_state"):
        resumed = state(tmp_path / "resumed/checkpoints/last.ckpt", key)
        for name, value in state(whole, key).items():
            torch.testing.assert_close(resumed[name], value, msg=name)


def test_a_run_that_goes_on_without_a_mean_has_the_weights_of_the_training(half, dataset, tmp_path):
    rest = "trainer.max_steps=8"
    tiny.train(dataset, tmp_path / "both", *STEPS, rest, f"run.resume={half}")
    without = [key for key in STEPS if not key.startswith("weight_averaging.")]
    tiny.train(dataset, tmp_path / "without", *without, rest, "weight_averaging=none", f"run.resume={half}")
    assert tiny.losses(tmp_path / "without") == tiny.losses(tmp_path / "both")


def module_and_mean(dtype):
    """A module whose mean, in single precision, is another value; and its averaging."""
    module = nn.Linear(1, 1, bias=False).to(dtype)
    averaging = AverageWeights()
    averaging._average_model = _Mean(nn.Linear(1, 1, bias=False), torch.device("cpu"), averaging._update)
    nn.init.constant_(averaging._average_model.module.weight, 1.001)
    with torch.no_grad():
        module.weight.fill_(2.0123456789012344)
    return module, averaging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_validation_rounds_neither_the_mean_nor_the_weights(dtype):
    module, averaging = module_and_mean(dtype)
    own, mean = module.weight.clone(), averaging._average_model.module.weight.clone()
    averaging.on_validation_epoch_start(None, module)
    assert module.weight.equal(mean.to(dtype))
    averaging.on_validation_epoch_end(None, module)
    assert module.weight.equal(own) and averaging._average_model.module.weight.equal(mean)


def test_a_checkpoint_in_the_middle_of_a_validation_has_both_in_their_places():
    module, averaging = module_and_mean(torch.float32)
    own, mean = module.weight.clone(), averaging._average_model.module.weight.clone()
    averaging.on_validation_epoch_start(None, module)
    checkpoint = {"state_dict": module.state_dict()}
    averaging.on_save_checkpoint(None, module, checkpoint)
    assert checkpoint["state_dict"]["weight"].equal(mean)
    assert checkpoint["current_model_state"]["weight"].equal(own)


def test_the_mean_is_loaded(whole):
    weight = load(whole).network.get_parameter("encoder.0.0.weight")
    assert torch.equal(weight, state(whole)["encoder.0.0.weight"])


@pytest.mark.parametrize(
    ("wrong", "message"), [("power=-1", "0 or more, got -1"), ("every=0", "at least 1, got 0")]
)
def test_values_out_of_range_are_errors(dataset, tmp_path, wrong, message):
    with pytest.raises(ValueError, match=rf"weight_averaging: \w+ must be .*{message}"):
        tiny.train(dataset, tmp_path / "run", f"weight_averaging.{wrong}")


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_the_mean_of_weights_of_another_precision(dataset, tmp_path, precision):
    tiny.train(dataset, tmp_path / "run", *STEPS, f"trainer.precision={precision}")
    averaged = state(tmp_path / "run/checkpoints/last.ckpt")
    assert {value.dtype for value in averaged.values() if value.is_floating_point()} == {torch.float32}
    assert all(value.isfinite().all() for value in averaged.values())


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_on_the_device_moves_the_mean_as_a_number_does(share):
    torch.manual_seed(0)
    current = [torch.randn(5, 3), torch.randn(7)]
    means = [[torch.ones(5, 3), torch.ones(7)] for _ in range(2)]
    move(means[0], current, torch.tensor(share))
    torch._foreach_lerp_(means[1], current, share)
    torch.testing.assert_close(means[0], means[1])
    assert share or torch.equal(means[0][0], torch.ones(5, 3))
