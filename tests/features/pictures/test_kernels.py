"""medconv/features/pictures/callbacks.py: which kernels are logged, when, and which weights they show."""

import numpy as np
import pytest
import torch
from helpers import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from medconv.features.pictures.callbacks import _shown_convs, kernel_picture

LOGGED = ("callbacks=default", "logger=tensorboard", "trainer.max_steps=8")


def test_the_first_a_middle_and_the_last_convolution_with_several_taps_are_shown():
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


def test_a_class_of_ones_own_is_shown_by_its_weight():
    network = nn.Sequential(Own(), nn.Linear(2, 2), nn.ConvTranspose2d(1, 1, 2), nn.Conv1d(1, 1, 3))
    assert list(_shown_convs(network)) == ["0"]


@pytest.mark.parametrize("conv", ["none", "basis"])
def test_a_run_logs_kernels_before_training_and_at_each_validation(tmp_path, conv):
    dataset = tiny.write_dataset(tmp_path / "data/tiny", cases=4)
    tiny.train(dataset, tmp_path / "run", *LOGGED, f"conv={conv}")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith("kernels/")]
    assert len(tags) == 3
    for tag in tags:
        images = events.Images(tag)
        assert [images[0].step, images[-1].step] == [0, 8]
        assert images[0].encoded_image_string != images[-1].encoded_image_string


def test_positive_is_red_negative_blue_and_zero_white():
    weight = np.zeros((1, 1, 3, 3))
    weight[0, 0, 0, 0] = 2.0
    weight[0, 0, 2, 2] = -2.0
    picture = kernel_picture(weight).astype(int)
    tap = 16  # pixels; a frame of 1 is around all taps
    assert picture[1 + tap // 2, 1 + tap // 2].tolist() == [178, 24, 43]
    assert picture[1 + 5 * tap // 2, 1 + 5 * tap // 2].tolist() == [33, 102, 172]
    assert picture[1 + 3 * tap // 2, 1 + 3 * tap // 2].tolist() == [255, 255, 255]


def test_kernels_share_a_scale_and_a_dead_layer_is_white():
    weight = np.ones((2, 1, 3, 3))
    weight[1] /= 10
    picture = kernel_picture(weight).astype(int)
    half = picture.shape[0] // 2
    assert picture[10, 10].tolist() == [178, 24, 43] and min(picture[half + 10, 10]) > 230
    assert kernel_picture(np.zeros((1, 1, 3, 3)))[10, 10].tolist() == [255, 255, 255]


def test_four_channels_evenly_spaced_and_the_slices_of_volumes_side_by_side():
    flat = kernel_picture(np.ones((64, 32, 3, 3)))
    assert flat.shape == (4 * 58, 4 * 58, 3) and flat.dtype == np.uint8
    volume = kernel_picture(np.ones((2, 1, 3, 3, 5)))
    assert volume.shape == (2 * 58, 5 * 50 + 8, 3)
    weight = np.zeros((64, 1, 3, 3))
    weight[-1] = 1.0  # the last channel is always shown
    assert kernel_picture(weight)[-20, 20].tolist() == [178, 24, 43]
