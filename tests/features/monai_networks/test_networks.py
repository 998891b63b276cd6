"""medconv/features/monai_networks/networks.py: MONAI's image-level networks with a stem for the image size."""

from contextlib import suppress

import pytest
import torch

from medconv.features.monai_networks.networks import DenseNet, EfficientNet, SEResNet, UNetPlusPlus
from medconv.planning.topology import stem_for

SMALL = {
    "densenet": lambda dims, stem: DenseNet(dims, 1, 3, 8, 4, [1, 1, 1, 1], stem=stem),
    "senet": lambda dims, stem: SEResNet(
        spatial_dims=dims, in_channels=1, num_classes=3, layers=[1, 1, 1, 1], inplanes=16, stem=stem
    ),
    "efficientnet": lambda dims, stem: EfficientNet(
        "efficientnet-b0", spatial_dims=dims, in_channels=1, num_classes=3, stem=stem
    ),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dims", [2, 3])
def test_the_stem_keeps_the_resolution_of_a_small_image(name, dims):
    image, sizes = torch.zeros(2, 1, *(32, 16)[dims - 2 :][:1] * dims), []
    first = {"densenet": "features.denseblock1", "senet": "layer1", "efficientnet": "_blocks.0"}[name]
    for stem in (stem_for(image.shape[2:]), None):
        network = SMALL[name](dims, stem).eval()
        network.get_submodule(first).register_forward_pre_hook(
            lambda m, args: sizes.append(args[0].shape[-1])
        )
        with torch.no_grad(), suppress(RuntimeError):  # after the usual stem, later layers see too few voxels
            assert network(image).shape == (2, 3)
    assert sizes == [image.shape[-1], image.shape[-1] // (2 if name == "efficientnet" else 4)]


@pytest.mark.parametrize("deep_supervision", [True, False])
def test_the_deepest_head_of_unetplusplus_comes_first(deep_supervision):
    settings = {"spatial_dims": 2, "features": (4, 4, 4, 4, 4, 6), "deep_supervision": deep_supervision}
    network, seen = UNetPlusPlus(**settings), []
    network.final_conv_0_4.register_forward_hook(lambda module, args, output: seen.append(output))
    output = network(torch.zeros(1, 1, 32, 32))
    assert (output[0] if deep_supervision else output) is seen[0]
    assert len(output) == (4 if deep_supervision else 1)
