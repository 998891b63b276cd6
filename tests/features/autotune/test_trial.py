"""medconv/features/autotune/trial.py: a trial is a training step, on a copy of the network, without dropout."""

import pytest
import torch
from helpers.networks import unet
from helpers.trials import work
from torch import nn

from medconv.features.autotune.trial import Choice, Trial


@pytest.mark.parametrize(
    "choice", [Choice("bf16-mixed"), Choice(channels_last=True, fast_norm=True)], ids=str
)
def test_a_trial_is_a_training_step(choice):
    job = work(unet("instance"))
    trial, plain = Trial(job, choice), Trial(job, Choice())
    losses = [(float(trial.step()), float(plain.step())) for _ in range(10)]
    assert losses[-1][1] < losses[0][1]
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=0.03 if choice.precision != "32-true" else 1e-4)


def test_a_trial_has_no_dropout():
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout2d(0.5))
    trial = Trial(work(network), Choice())
    assert torch.equal(trial.forward(), trial.forward())
    assert network[1].training


def test_images_of_one_channel_are_channels_last():
    job = work(unet("instance"))
    assert Trial(job, Choice(channels_last=True)).image.stride() == (256, 1, 16, 1)
    assert Trial(job, Choice()).image.stride() == (256, 256, 16, 1)


def test_a_larger_batch_repeats_the_images():
    job = work(unet("instance"))
    larger = job.larger(3)
    assert torch.equal(larger.image[2:4], job.image) and torch.equal(larger.label[4:], job.label)
