"""medconv/models/pretrained/fit.py: one tensor at a time; whole files are in test_load.py."""

from dataclasses import replace

import torch
from torch import nn

from medconv.models.pretrained.adapt import Layers
from medconv.models.pretrained.fit import Fit, Pair, convolution_of

NETWORK = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 5, 1))
LAYERS = Layers(image=frozenset({"0"}), head=frozenset({"2"}))
FIT = Fit(NETWORK, num_channels=2, layers=LAYERS, inflate_2d=None, axis=2, has_other_classes=False)


def pair(name: str, *shape: int) -> Pair:
    return Pair(file=torch.randn(shape), network=NETWORK.state_dict()[name])


def test_equal_shapes_are_taken_as_they_are() -> None:
    same = pair("0.weight", 4, 2, 3, 3, 3)
    value, note = FIT("0.weight", same)
    assert value is same.file and note == ""


def test_a_kernel_of_2d_images_with_other_channels_is_adapted_twice() -> None:
    fit = replace(FIT, inflate_2d="inflate")
    value, note = fit("0.weight", pair("0.weight", 4, 3, 3, 3))
    assert value is not None and value.shape == (4, 2, 3, 3, 3)
    assert note == "(4, 3, 3, 3) to (4, 2, 3, 3, 3): 2D to 3D by inflate, axis 2, other input channels"


def test_what_does_not_fit_has_a_reason() -> None:
    assert FIT("2.bias", pair("2.bias", 3)) == (None, "(3,) in the file, here (5,)")
    whole_numbers = Pair(torch.ones(5, dtype=torch.int64), NETWORK.state_dict()["2.bias"])
    assert FIT("2.bias", whole_numbers) == (None, "torch.int64 in the file, here torch.float32")
    other_classes = replace(FIT, has_other_classes=True)
    assert other_classes("2.bias", pair("2.bias", 5)) == (None, "head of other classes")


def test_the_convolution_of_a_tensor() -> None:
    assert convolution_of(NETWORK, "2.weight") is NETWORK[2]
    assert convolution_of(NETWORK, "1.weight") is None and convolution_of(NETWORK, "7.weight") is None
