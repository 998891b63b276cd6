"""medconv/features/image_level/encoder.py: the encoder of our U-Net with outputs per image, in its place."""

import pytest
import torch

from medconv.features.image_level.encoder import Encoder, as_encoder
from medconv.models.unet import UNet


@pytest.mark.parametrize("dims", [2, 3])
def test_the_encoder_is_that_of_the_unet(dims):
    torch.manual_seed(0)
    unet, encoder = UNet(dims, 1, 3, [4, 8, 8], [2, 2]), Encoder(dims, 1, 5, [4, 8, 8], [2, 2])
    shared = {k: v for k, v in unet.state_dict().items() if k.startswith(("encoder.", "down."))}
    assert shared.keys() == {k for k in encoder.state_dict() if not k.startswith("head.")}
    encoder.load_state_dict({**encoder.state_dict(), **shared})
    image = torch.randn(2, 1, *(8, 12, 8)[:dims])
    deepest = unet.eval().features(image)[-1]
    head = encoder.head
    expected = torch.einsum("bc,oc->bo", deepest.flatten(2).mean(2), head.weight.flatten(1)) + head.bias
    torch.testing.assert_close(encoder.eval()(image), expected)
    with pytest.raises(ValueError, match="must be divisible by"):
        encoder(torch.zeros(1, 1, *(9, 12, 8)[:dims]))


def test_residual_blocks_add_to_their_input():
    """At first a stage passes its input on, so the network is its stem, steps and head."""
    torch.manual_seed(0)
    network, image = Encoder(2, 1, 3, [4, 8], [2], residual_blocks=[1, 2, 5]).eval(), torch.randn(2, 1, 8, 8)
    assert [len(stage) for stage in network.encoder] == [2, 2]  # the first begins with a convolution
    stem = network.encoder[0][0]
    activation = torch.nn.LeakyReLU(0.01)
    coarse = network.down[0](activation(stem(image)))
    torch.testing.assert_close(network.features(image)[1], activation(activation(coarse)))
    block = network.encoder[1][0]
    torch.nn.init.ones_(block.convs[-1].weight)
    torch.testing.assert_close(block(coarse), activation(coarse + block.convs(coarse)))
    with pytest.raises(ValueError, match=r"residual_blocks must have 2 entries or more, .* got \[1\]"):
        Encoder(2, 1, 3, [4, 8], [2], residual_blocks=[1])


class Half(UNet):
    """A network of the user's own, which may return what it likes."""


def model(target):
    return {"_target_": target, "in_channels": 1}


@pytest.mark.parametrize("target", ["medconv.models.UNet", "medconv.models.unet.UNet"])
def test_our_unet_is_replaced_by_whatever_name_it_is_imported(target):
    assert as_encoder(model(target)) == model("medconv.features.image_level.encoder.Encoder")


@pytest.mark.parametrize(
    "target", [f"{__name__}.Half", "monai.networks.nets.UNet", "no.such.package.Network"]
)
def test_other_networks_stay(target):
    """A missing one is named when it is built."""
    assert as_encoder(model(target)) == model(target)
