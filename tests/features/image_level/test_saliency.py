"""Saliency maps: their place, networks of all families, and that the network stays unchanged."""

import numpy as np
import pytest
import torch
from monai.networks import nets
from torch import nn

from medconv.features.image_level import saliency
from medconv.models.unet import UNet


class Corner(nn.Module):
    """The first output grows with bright voxels, the second with dark ones."""

    def __init__(self, dims: int, inplace: bool = False) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        self.stem = conv(1, 2, 1, bias=False)
        self.norm = norm(2)
        self.relu = nn.ReLU(inplace=inplace)
        self.stem.weight.data = torch.tensor([1.0, -1.0]).reshape(2, 1, *(1,) * dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.norm(self.stem(x))).flatten(2).mean(2)


def spotted(shape, bright, dark):
    image = torch.zeros(1, 1, *shape)
    image[(0, 0, *bright)], image[(0, 0, *dark)] = 3.0, -3.0
    return image


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("shape", "bright", "dark"), [((8, 9), (1, 7), (6, 2)), ((6, 8, 7), (5, 1, 2), (0, 6, 4))]
)
def test_the_maximum_lies_at_the_voxel_that_supports_the_output(shape, bright, dark, inplace):
    network, image = Corner(len(shape), inplace).train(), spotted(shape, bright, dark)
    batch = torch.cat([image, image, image * 0])
    maps = saliency.saliency(network, batch, [0, 1, 0])
    assert maps.shape == (3, *shape) and maps.dtype == np.float32
    assert [np.unravel_index(each.argmax(), shape) for each in maps[:2]] == [bright, dark]
    assert maps[:2].max((*range(1, len(shape) + 1),)).tolist() == [1, 1] and not maps[2].any()
    assert (saliency.saliency(network, image, 1) == maps[1]).all()
    brighter = 2 * image + (image > 0)  # the first output is the highest
    assert (saliency.saliency(network, brighter) == saliency.saliency(network, brighter, 0)).all()


def test_the_network_is_unchanged():
    network = Corner(2, inplace=True).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.inference_mode():
        saliency.saliency(network, torch.randn(2, 1, 8, 8), 1)
    assert network.training and network.relu.inplace and all(p.grad is None for p in network.parameters())
    assert all((value == before[name]).all() for name, value in network.state_dict().items())
    assert not any(m._forward_hooks or m._backward_hooks for m in network.modules())


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("family", ["resnet", "densenet", "efficientnet", "senet"])
def test_networks_of_monai_have_maps(family, dims):
    torch.manual_seed(0)
    network = {
        "resnet": lambda: nets.ResNet(
            "basic",
            [1, 1, 1, 1],
            [4, 8, 8, 8],
            dims,
            1,
            conv1_t_size=3,
            conv1_t_stride=1,
            num_classes=3,
            no_max_pool=True,
        ),
        "densenet": lambda: nets.DenseNet(dims, 1, 3, init_features=4, growth_rate=4, block_config=(1, 1)),
        "efficientnet": lambda: nets.EfficientNetBN(
            "efficientnet-b0", pretrained=False, spatial_dims=dims, in_channels=1, num_classes=3
        ),
        "senet": lambda: nets.SENet(
            dims, 1, nets.senet.SEResNetBottleneck, (1, 1, 1, 1), 1, 4, inplanes=8, num_classes=3
        ),
    }[family]()
    size = 64 if family == "efficientnet" else 28  # it fails for smaller images in any case
    image = torch.randn(2, 1, *(size,) * dims)
    maps = saliency.saliency(network, image, [0, 2])
    assert maps.shape == (2, *(size,) * dims) and np.isfinite(maps).all()
    assert {0.0, 1.0} >= {float(each.max()) for each in maps}


def test_a_network_without_a_spatial_layer_is_refused():
    with pytest.raises(ValueError, match="needs a layer whose output has the image's axes"):
        saliency.saliency(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), torch.randn(1, 1, 8, 8), 0)


def test_a_layer_that_is_called_twice_is_not_used():
    class Twice(Corner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(self.norm(self.relu(self.stem(x)))).flatten(2).mean(2)

    assert saliency._layer(Twice(2), torch.randn(1, 1, 8, 8)) == "norm"


def test_a_picture_of_our_network_shows_all_planes():
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = UNet(
                in_channels=1, out_channels=2, spatial_dims=3, channels=[4, 8], strides=[2], kernel_size=3
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).flatten(2).mean(2)

    picture = saliency.overlay(Pooled(), torch.randn(1, 8, 10, 6), (1.0, 1.0, 2.0), 1)
    assert picture.dtype == np.uint8 and picture.shape[2] == 3 and picture.shape[0] > 3 * 100
