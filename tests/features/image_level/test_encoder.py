"""medconv/features/image_level/encoder.py and output_scaling.py: outputs per image, in physical units."""

import copy
import pickle

import pytest
import torch
from torch import nn

from medconv.convs import fold_convs
from medconv.features.image_level.encoder import Encoder, as_encoder
from medconv.features.image_level.output_scaling import in_units
from medconv.models.mixin import Mixin
from medconv.models.unet import UNet
from medconv.performance.switches import apply_switches


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


def test_in_units_scales_the_outputs_and_changes_nothing_else():
    torch.manual_seed(0)
    plain = Encoder(2, 1, 2, [4, 8], [2]).eval()
    image, names = torch.randn(3, 1, 8, 8), list(plain.state_dict())
    with torch.no_grad():
        expected = plain(image) * torch.tensor([10.0, 2.0]) + torch.tensor([60.0, -1.0])
    network = in_units(copy.deepcopy(plain), [60.0, -1.0], [10.0, 2.0])
    assert list(network.state_dict()) == names and isinstance(network, Encoder)
    assert type(in_units(copy.deepcopy(plain), [0.0, 0.0], [1.0, 1.0])) is type(network)
    apply_switches(
        checkpointed := copy.deepcopy(network), channels_last=True, activation_checkpointing="pointwise"
    )
    traced = torch.jit.trace(network, image)
    assert isinstance(checkpointed, Mixin) and type(checkpointed) is not type(network)
    pickled = pickle.loads(pickle.dumps(checkpointed))
    assert type(pickled) is type(checkpointed)
    copies = (copy.deepcopy(network), fold_convs(network), copy.deepcopy(checkpointed), pickled)
    for form in (network, *copies, traced):
        with torch.no_grad():
            torch.testing.assert_close(form(image), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(image).dtype == torch.float32
    assert isinstance(network.to("cpu", torch.float32), nn.Module)
