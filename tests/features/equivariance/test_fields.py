"""medconv/features/equivariance/fields.py: which layers work on fields, and whether a network commutes with flips."""

import pytest
import torch
from torch import Tensor, nn

from medconv.convs import swap_convs
from medconv.features.equivariance.equivariant import Equivariant
from medconv.features.equivariance.fields import check_equivariance, fields
from medconv.features.equivariance.group import Group
from medconv.models.unet import UNet


class Joined(nn.Module):
    """Concatenates the image with features of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.cat([x, self.first(x).relu_()], 1)))


def test_layers_between_the_first_and_the_last_read_and_write_fields():
    stages = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.PReLU(4)]
    network = nn.Sequential(*stages, nn.Conv2d(4, 2, 1))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    assert fields(network, torch.randn(2, 1, 8, 8)) == {
        "0": (False, True),
        "1": (True, True),
        "3": (True, True),
        "4": (True, True),
        "5": (True, False),
    }
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def test_features_that_are_concatenated_with_the_image_are_no_fields():
    assert fields(Joined(), torch.randn(2, 1, 8, 8)) == {
        "first": (False, False),
        "second": (False, True),
        "head": (True, False),
    }


def test_the_check_finds_a_network_that_is_symmetric_only_at_first():
    """A batch norm whose copies are untied is symmetric at first, with scale 1 and shift 0."""
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 3, padding=1))
    image = torch.randn(2, 1, 8, 8)
    swap_convs(network, Equivariant((0,)), example=image)
    check_equivariance(network, image, Group(2, (0,)))
    network[1] = nn.BatchNorm2d(2)
    with pytest.raises(ValueError, match=r"layer 1 \(BatchNorm2d\) breaks it"):
        check_equivariance(network, image, Group(2, (0,)))


def test_a_network_is_checked_in_full_precision_where_the_caller_computes_in_half():
    network = UNet(2, 1, 2, (16, 32), (2,))
    with torch.autocast("cpu", torch.bfloat16):
        swap_convs(network, Equivariant((0,)), example=torch.randn(2, 1, 64, 64))


def test_the_check_refuses_outputs_that_are_not_finite():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3))
    torch.nn.init.constant_(network[1].bias, float("nan"))
    with pytest.raises(ValueError, match="error nan"):
        check_equivariance(network, torch.randn(1, 1, 8, 8), Group(2, (0,)))


class Half(nn.Module):
    """Drops every second sample or so in training, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), *[1] * (x.ndim - 1)) < 0.5) if self.training else x


def test_what_is_random_in_training_does_not_break_the_symmetry():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), Half(), nn.Dropout2d(0.5), nn.Conv2d(2, 1, 3, padding=1)
    )
    image = torch.randn(16, 1, 8, 8)
    swap_convs(network, Equivariant((0,)), example=image)
    state = torch.get_rng_state()
    check_equivariance(network, image, Group(2, (0,)))
    assert torch.equal(torch.get_rng_state(), state)
