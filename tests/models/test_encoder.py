"""Networks for whole images: the encoder that the U-Net has, too, stems for small images, and outputs in
their own units.
"""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from medconv.convs import Mirror, fold_convs, swap_convs
from medconv.models.encoder import Encoder
from medconv.models.monai_networks import DenseNet, EfficientNet, SEResNet, stem_for
from medconv.models.output_scaling import in_units
from medconv.models.unet import UNet
from medconv.performance.switches import apply_switches


@pytest.mark.parametrize("dims", [2, 3])
def test_the_encoder_is_that_of_the_unet(dims: int) -> None:
    torch.manual_seed(0)
    unet, encoder = UNet(dims, 1, 3, [4, 8, 8], [2, 2]), Encoder(dims, 1, 5, [4, 8, 8], [2, 2])
    shared = {k: v for k, v in unet.state_dict().items() if k.startswith(("encoder.", "down."))}
    assert shared.keys() == {k for k in encoder.state_dict() if not k.startswith("head.")}
    encoder.load_state_dict({**encoder.state_dict(), **shared})
    image = torch.randn(2, 1, *(8, 12, 8)[:dims])
    deepest = unet.eval().features(image)[-1]
    found = encoder.eval()(image)
    head = encoder.head
    wanted = torch.einsum("bc,oc->bo", deepest.flatten(2).mean(2), head.weight.flatten(1)) + head.bias
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="must be divisible by"):
        encoder(torch.zeros(1, 1, *(9, 12, 8)[:dims]))


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_mirror_makes_the_answer_indifferent_to_flips(axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network, image = Encoder(2, 1, 3, [8, 16], [2]), torch.randn(4, 1, 8, 8)
    swap_convs(network, Mirror(axes), example=image)
    for form in (network.eval(), fold_convs(network)):
        for axis in axes:
            torch.testing.assert_close(form(image.flip(2 + axis)), form(image), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(network(image), network(image.transpose(2, 3)), atol=1e-3)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((28, 28), (3, 1, True)),
        ((64, 64), (3, 1, True)),
        ((96, 96), (3, 1, False)),
        ((224, 224), (7, 2, False)),
        ((28, 28, 28), (3, 1, False)),
        ((16, 16, 16), (3, 1, True)),
        ((96, 96, 64), (7, 2, False)),
    ],
)
def test_the_stem_follows_the_size(size: tuple[int, ...], wanted: tuple[int, int, bool]) -> None:
    assert tuple(stem_for(size).values()) == wanted


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
def test_a_small_image_keeps_its_resolution_at_first(name: str, dims: int) -> None:
    image, sizes = torch.zeros(2, 1, *(32, 16)[dims - 2 :][:1] * dims), []
    first = {"densenet": "features.denseblock1", "senet": "layer1", "efficientnet": "_blocks.0"}[name]
    for stem in (stem_for(image.shape[2:]), None):
        network = SMALL[name](dims, stem).eval()
        network.get_submodule(first).register_forward_pre_hook(
            lambda m, args: sizes.append(args[0].shape[-1])
        )
        with torch.no_grad(), suppress(RuntimeError):  # the usual stem leaves too little for what comes later
            assert network(image).shape == (2, 3)
    assert sizes == [image.shape[-1], image.shape[-1] // (2 if name == "efficientnet" else 4)]


def test_outputs_in_their_own_units_keep_everything_else() -> None:
    torch.manual_seed(0)
    plain = Encoder(2, 1, 2, [4, 8], [2]).eval()
    image, names = torch.randn(3, 1, 8, 8), list(plain.state_dict())
    with torch.no_grad():
        wanted = plain(image) * torch.tensor([10.0, 2.0]) + torch.tensor([60.0, -1.0])
    network = in_units(copy.deepcopy(plain), [60.0, -1.0], [10.0, 2.0])
    assert (
        list(network.state_dict()) == names
        and isinstance(network, Encoder)
        and type(network).__name__ == "Encoder"
    )
    assert type(in_units(copy.deepcopy(plain), [0.0, 0.0], [1.0, 1.0])) is type(network)
    apply_switches(
        checked := copy.deepcopy(network), channels_last=True, activation_checkpointing="pointwise"
    )
    traced = torch.jit.trace(network, image)
    for form in (network, copy.deepcopy(network), fold_convs(network), copy.deepcopy(checked), traced):
        with torch.no_grad():
            torch.testing.assert_close(form(image), wanted, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(image).dtype == torch.float32
    assert isinstance(network.to("cpu", torch.float32), nn.Module)
