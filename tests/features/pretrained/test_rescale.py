"""medconv/features/pretrained/rescale.py: kernels before a norm get another size, outputs stay."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers.conv_family import WEIGHT_PRIORS, build, dims_of
from helpers.pretrained import DERIVED, resnet, save
from monai.networks.nets import UNet as MonaiUNet
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.features.pretrained.load import load
from medconv.features.pretrained.rescale import kernel_sizes, rescale
from medconv.models.unet import UNet

IMAGES = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def grown(network):
    """A copy with kernels as large as after a training."""
    copy = deepcopy(network)
    for name in kernel_sizes(copy):
        copy.get_submodule(name).weight.data.mul_(45)
    return copy


def outputs(network):
    with torch.no_grad():
        return network(IMAGES)


@pytest.mark.parametrize("residual_blocks", [None, [1, 2]])
def test_kernels_get_the_size_of_random_ones_and_outputs_stay(residual_blocks):
    torch.manual_seed(0)
    network = UNet(2, 1, 3, (4, 8), (2,), norm="instance", residual_blocks=residual_blocks)
    sizes = kernel_sizes(network)
    trained = grown(network)
    expected = outputs(trained)
    # the encoder's and the decoder's convolutions; not those that lead up or down, and not the head
    assert len(rescale(trained, sizes)) == len(sizes) == (6 if residual_blocks is None else 9)
    for name, size in kernel_sizes(trained).items():
        assert 0.7 < size / sizes[name] < 1.42
    torch.testing.assert_close(outputs(trained), expected, rtol=1e-3, atol=1e-3)


def test_loading_scales_kernels_to_the_size_of_random_ones(tmp_path):
    torch.manual_seed(1)
    source = grown(UNet(2, 1, 3, (4, 8), (2,), norm="instance"))
    network = UNet(2, 1, 3, (4, 8), (2,), norm="instance")
    sizes = kernel_sizes(network)
    report = load(network, save(tmp_path / "file.pth", source.state_dict()), DERIVED)
    assert report.rescaled.keys() == sizes.keys() and "6 kernels rescaled" in str(report)
    assert "  rescaled  encoder.0.0  times 0.0" in report.table()
    assert not torch.equal(network.encoder[0][0].weight, source.encoder[0][0].weight)
    assert torch.equal(network.up[0].weight, source.up[0].weight)  # no norm follows
    assert all(0.7 < size / sizes[name] < 1.42 for name, size in kernel_sizes(network).items())
    torch.testing.assert_close(outputs(network), outputs(source), rtol=1e-3, atol=1e-3)


def test_kernels_and_biases_of_nested_blocks_are_scaled_together():
    torch.manual_seed(0)
    network = MonaiUNet(
        2, 1, 4, channels=(4, 8), strides=(2,), num_res_units=2, norm=("group", {"num_groups": 2})
    )
    sizes = kernel_sizes(network)
    trained = grown(network)
    expected = outputs(trained)
    assert rescale(trained, sizes).keys() == sizes.keys() and sizes
    torch.testing.assert_close(outputs(trained), expected, rtol=1e-3, atol=1e-3)


# `transform` has a forward of its own
@pytest.mark.parametrize("name", sorted(set(WEIGHT_PRIORS) - {"transform"}))
def test_computed_weights_are_scaled_through_their_parameters(name):
    dims = dims_of(name)[0]
    block = nn.Sequential(build(name, dims), nn.GroupNorm(2, 6))
    before = block[0].weight.detach().clone()
    sizes = {"0": float(before.norm()) / 8}
    assert rescale(block, sizes) == {"0": 0.125}
    torch.testing.assert_close(block[0].weight, before / 8)


class _Squared(nn.Module):
    def forward(self, original: Tensor) -> Tensor:
        return original.square()


class _Standardised(nn.Conv2d):
    def forward(self, image: Tensor) -> Tensor:
        return self._conv_forward(image, self.weight / self.weight.norm(), self.bias)


class _Backwards(nn.Sequential):
    def forward(self, image: Tensor) -> Tensor:
        for layer in reversed(self):
            image = layer(image)
        return image


def shared():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(conv, nn.InstanceNorm2d(4), conv, nn.ReLU())


def squared():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    parametrize.register_parametrization(conv, "weight", _Squared())
    return nn.Sequential(conv, nn.InstanceNorm2d(4))


UNSCALED = {
    "batch norm": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
    "running statistics": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)
    ),
    "used twice": shared,
    "a weight that is not linear": squared,
    "a forward of its own": lambda: nn.Sequential(_Standardised(4, 4, 3), nn.InstanceNorm2d(4)),
    "an order of its own": lambda: _Backwards(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)),
    "an activation between": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.InstanceNorm2d(4)),
    "no sequence": lambda: resnet().layer1,
    "kernels of zeros": lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4)),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_what_another_scale_would_change_stays(name):
    torch.manual_seed(0)
    network = UNSCALED[name]()
    sizes = {conv: size / 8 for conv, size in kernel_sizes(network).items()}
    if name == "kernels of zeros":
        nn.init.zeros_(network[0].weight)
    if name in ("batch norm", "running statistics"):
        network[0].weight.data.mul_(45)
        sizes = {"0": 1.0}
    before = {key: value.clone() for key, value in network.state_dict().items()}
    assert rescale(network, sizes) == {}
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
