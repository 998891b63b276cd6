"""medconv/features/pretrained/fit.py: another number of channels, 2D kernels in 3D, and the layers that change."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.pretrained import DERIVED, UNET_LAYERS, our_checkpoint, save, unet
from torch import nn

from medconv.convs import acs, basis, swap_convs
from medconv.features.pretrained.fit import Fit, Layers, Pair, convolution_of, layers_of
from medconv.features.pretrained.load import load
from medconv.models.unet import UNet


@pytest.mark.parametrize(("old", "new"), [(3, 1), (1, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("conv", ["plain", "basis"])
def test_an_image_with_equal_channels_gives_the_same_logits_for_another_number_of_channels(
    old, new, conv, tmp_path
):
    source, network = unet(channels=old, seed=1), unet(channels=new, seed=2)
    if conv == "basis":
        for model in (source, network):
            swap_convs(model, basis)
    path = save(tmp_path / "ours.ckpt", our_checkpoint(source, DERIVED))
    report = load(network, path, replace(DERIVED, num_channels=new), UNET_LAYERS)
    assert len(report.reshaped) == 1 and not report.random
    image = torch.rand(1, 1, 16, 16)
    with torch.no_grad():
        logits = network(image.expand(-1, new, -1, -1))
        expected = source(image.expand(-1, old, -1, -1))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_only_layers_that_read_the_image_are_adapted_to_its_channels(tmp_path):
    """A layer elsewhere may have as many inputs as the image has channels."""
    report = load(
        unet(widths=(1, 8)), save(tmp_path / "file.pth", unet(seed=1).state_dict()), DERIVED, UNET_LAYERS
    )
    assert (
        report.random["down.0.weight"] == "(8, 4, 2, 2) in the file, here (8, 1, 2, 2)"
        and not report.reshaped
    )


@pytest.mark.parametrize("file_axis", [None, 0, 1, 2])
def test_an_inflated_network_gives_the_logits_of_the_2d_network(file_axis, tmp_path):
    """For an image that is constant along the new axis, away from its borders."""
    flat, solid = unet(2, seed=1), unet(3, seed=2)
    path = save(tmp_path / "ours.ckpt", our_checkpoint(flat, replace(DERIVED, slice_axis=file_axis)))
    report = load(solid, path, DERIVED, UNET_LAYERS, "inflate")
    assert not report.random and all("2D to 3D by inflate" in words for words in report.reshaped.values())
    axis = 2 if file_axis is None else file_axis
    image = torch.rand(1, 1, 16, 16)
    with torch.no_grad():
        expected = flat(image)
        logits = solid(image.unsqueeze(2 + axis).repeat_interleave(40, 2 + axis)).select(2 + axis, 20)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_2d_kernels_are_repeated_along_the_axis_for_which_they_fit(tmp_path):
    flat = unet(2, seed=1)
    solid = UNet(3, 1, 3, (4, 8), strides=[(1, 2, 2)], kernel_size=[(1, 3, 3), (3, 3, 3)])
    report = load(solid, save(tmp_path / "flat.pth", flat.state_dict()), DERIVED, None, "inflate")
    assert not report.random and all("axis 0" in words for words in report.reshaped.values())
    assert torch.equal(solid.encoder[0][0].weight[:, :, 0], flat.encoder[0][0].weight)


def test_acs_puts_2d_weights_unchanged_into_planes_and_conv_acs_keeps_them(tmp_path):
    flat, solid = unet(2, seed=1, widths=(6, 9)), unet(3, seed=2, widths=(6, 9))
    load(solid, save(tmp_path / "flat.pth", flat.state_dict()), DERIVED, None, "acs")
    dense, planes = solid.encoder[0][3].weight.detach(), flat.encoder[0][3].weight.detach()
    for third, axis in zip(dense.split(2), (4, 3, 2), strict=True):  # axial, coronal, sagittal
        assert third.select(axis, 0).abs().max() == 0 and third.select(axis, 2).abs().max() == 0
    assert torch.equal(dense[:2, ..., 1], planes[:2]) and torch.equal(dense[4:, :, 1], planes[4:])
    image = torch.rand(1, 1, 8, 8, 8)
    with torch.no_grad():
        before = solid(image)
        report = swap_convs(solid, partial(acs, init_from_weights=True))
        torch.testing.assert_close(solid(image), before)
    assert max(report.errors.values()) < 1e-6


def node(target, **more):
    return {"_target_": target, "spatial_dims": 2, "in_channels": 1, "out_channels": 2, **more}


NODES = {
    "ours": (node("medconv.models.UNet", channels=[4, 8], strides=[2]), {"encoder.0.0"}, {"head"}),
    "MONAI's U-Net": (
        node("monai.networks.nets.UNet", channels=[4, 8], strides=[2], num_res_units=1),
        {"model.0.conv.unit0.conv", "model.0.residual"},
        {"model.2.0.conv", "model.2.1.conv.unit0.conv"},
    ),
    "DynUNet": (
        node(
            "monai.networks.nets.DynUNet",
            kernel_size=[3, 3, 3],
            strides=[1, 2, 2],
            upsample_kernel_size=[2, 2],
            filters=[4, 8, 8],
        ),
        {"input_block.conv1.conv", "skip_layers.downsample.conv1.conv"},
        {"output_block.conv.conv"},
    ),
    "SegResNet": (
        node("monai.networks.nets.SegResNet", init_filters=8),
        {"convInit.conv"},
        {"conv_final.2.conv"},
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_layers_of_finds_the_layers_whose_size_depends_on_the_dataset(name):
    """By building the network with one more channel and one more output, not by names or types."""
    model, image, head = NODES[name]
    state = torch.get_rng_state()
    layers = layers_of(model, {**model, "in_channels": 2}, {**model, "out_channels": 3})
    assert torch.equal(torch.get_rng_state(), state)
    assert (layers.image, layers.head) == (frozenset(image), frozenset(head))
    assert layers.kernels and all(name.endswith("weight") for name in layers.kernels)
    assert not layers_of(model, {**model, "in_channels": "two"}, model).image


class Reads(nn.Sequential):
    """As MONAI's Swin networks, it reads a tensor as it is built, which none has on `meta`."""

    def __init__(self, in_channels: int = 1, out_channels: int = 2) -> None:
        width = int(torch.linspace(0, 4, 2)[1].item())
        super().__init__(nn.Conv2d(in_channels, width, 1), nn.Conv2d(width, out_channels, 1))


def test_layers_of_a_network_that_cannot_be_built_without_memory_are_found():
    model = {"_target_": f"{__name__}.Reads", "in_channels": 1, "out_channels": 2}
    layers = layers_of(model, {**model, "in_channels": 2}, {**model, "out_channels": 3})
    assert layers == Layers(frozenset({"0"}), frozenset({"1"}), frozenset({"0.weight", "1.weight"}))


NETWORK = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 5, 1))
LAYERS = Layers(image=frozenset({"0"}), head=frozenset({"2"}))
FIT = Fit(NETWORK, num_channels=2, layers=LAYERS, inflate_2d=None, axis=2, has_other_classes=False)


def pair(name, *shape):
    return Pair(file=torch.randn(shape), network=NETWORK.state_dict()[name])


def test_equal_shapes_are_taken_as_they_are():
    same = pair("0.weight", 4, 2, 3, 3, 3)
    value, note = FIT("0.weight", same)
    assert value is same.file and note == ""


def test_a_kernel_of_2d_images_with_other_channels_is_adapted_twice():
    fit = replace(FIT, inflate_2d="inflate")
    value, note = fit("0.weight", pair("0.weight", 4, 3, 3, 3))
    assert value is not None and value.shape == (4, 2, 3, 3, 3)
    assert note == "(4, 3, 3, 3) to (4, 2, 3, 3, 3): 2D to 3D by inflate, axis 2, other input channels"


def test_what_does_not_fit_has_a_reason():
    assert FIT("2.bias", pair("2.bias", 3)) == (None, "(3,) in the file, here (5,)")
    whole_numbers = Pair(torch.ones(5, dtype=torch.int64), NETWORK.state_dict()["2.bias"])
    assert FIT("2.bias", whole_numbers) == (None, "torch.int64 in the file, here torch.float32")
    other_classes = replace(FIT, has_other_classes=True)
    assert other_classes("2.bias", pair("2.bias", 5)) == (None, "head of other classes")


def test_the_convolution_of_a_tensor():
    assert convolution_of(NETWORK, "2.weight") is NETWORK[2]
    assert convolution_of(NETWORK, "1.weight") is None and convolution_of(NETWORK, "7.weight") is None
