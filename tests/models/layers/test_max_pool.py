"""medconv/models/layers/max_pool.py against nn.MaxPool3d."""

import pytest
import torch
from monai.networks import nets
from torch import nn

from medconv.models.layers.max_pool import WindowMaxPool3d, swap_pools


@pytest.mark.parametrize(
    "settings", [{"kernel_size": 2}, {"kernel_size": (1, 2, 3)}, {"kernel_size": 3, "stride": 3}]
)
def test_values_and_gradients_are_those_of_max_pooling(settings):
    plain, swapped = nn.MaxPool3d(**settings), nn.Sequential(nn.MaxPool3d(**settings))
    assert swap_pools(swapped) == 1
    torch.manual_seed(0)
    image = torch.randn(2, 3, 7, 8, 9).relu()  # with many equal values
    results = []
    for pool in (plain, swapped):
        x = image.clone().requires_grad_()
        output = pool(x)
        output.backward(torch.arange(output.numel(), dtype=torch.float32).view_as(output))
        results.append((output.detach(), x.grad))
    for expected, value in zip(*results, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": 2, "ceil_mode": True},
    ],
)
def test_overlapping_or_padded_windows_are_not_swapped(settings):
    network = nn.Sequential(nn.MaxPool3d(**settings))
    assert swap_pools(network) == 0 and type(network[0]) is nn.MaxPool3d


def test_all_pools_of_monais_basicunet_are_swapped():
    network = nets.BasicUNet(3, 1, 2, (4, 4, 4, 4, 4, 4))
    assert swap_pools(network) == 4
    assert sum(isinstance(layer, WindowMaxPool3d) for layer in network.modules()) == 4
