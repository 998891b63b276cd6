"""medconv/training/callbacks/kernel_logger.py: which kernels are logged, when, and which weights they show."""

from pathlib import Path

import pytest
import torch
from helpers import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from medconv.training.callbacks.kernel_logger import _shown_convs

LOGGED = ("callbacks=default", "logger=tensorboard", "trainer.max_steps=8")


def test_the_first_a_middle_and_the_last_convolution_with_several_taps_are_shown() -> None:
    convs = [nn.Conv2d(1, 1, 3) for _ in range(4)]
    network = nn.Sequential(nn.Conv2d(1, 1, 1), *convs, nn.Conv2d(1, 1, 1))
    assert list(_shown_convs(network)) == ["1", "3", "4"]
    assert _shown_convs(network)["3"] is convs[2]
    assert _shown_convs(nn.Linear(1, 1)) == {}
    assert list(_shown_convs(nn.Sequential(convs[0]))) == ["0"]


class Own(nn.Module):
    """A convolution that is no nn.Conv2d; its kernel is its `weight`, (out, in, *kernel_size)."""

    @property
    def weight(self) -> torch.Tensor:
        return torch.ones(2, 1, 3, 3)


def test_a_class_of_ones_own_is_shown_by_its_weight() -> None:
    network = nn.Sequential(Own(), nn.Linear(2, 2), nn.ConvTranspose2d(1, 1, 2), nn.Conv1d(1, 1, 3))
    assert list(_shown_convs(network)) == ["0"]


@pytest.mark.parametrize("conv", ["none", "basis"])
def test_a_run_logs_kernels_before_training_and_at_each_validation(tmp_path: Path, conv: str) -> None:
    dataset = tiny.write_dataset(tmp_path / "data/tiny", cases=4)
    tiny.train(dataset, tmp_path / "run", *LOGGED, f"conv={conv}")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith("kernels/")]
    assert len(tags) == 3
    for tag in tags:
        images = events.Images(tag)
        assert [images[0].step, images[-1].step] == [0, 8]
        assert images[0].encoded_image_string != images[-1].encoded_image_string
