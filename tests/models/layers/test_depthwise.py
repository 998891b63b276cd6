"""medconv/models/layers/depthwise.py against the grouped convolution of torch."""

from copy import deepcopy

import pytest
import torch
from monai.networks import nets
from torch import nn

from medconv.models.layers.depthwise import (
    BlockDepthwiseConv3d,
    block_size,
    block_weight,
    has_depthwise,
    swap_depthwise,
)

LAYERS = {
    "plain": {"in_channels": 32, "out_channels": 32, "kernel_size": 3, "padding": 1},
    "stride, dilation, no bias": {
        "in_channels": 24,
        "out_channels": 24,
        "kernel_size": 3,
        "padding": 2,
        "stride": (1, 2, 2),
        "dilation": 2,
        "bias": False,
    },
    "two outputs a channel": {
        "in_channels": 6,
        "out_channels": 12,
        "kernel_size": (1, 3, 5),
        "padding": (0, 1, 2),
    },
    "same": {"in_channels": 20, "out_channels": 20, "kernel_size": 5, "padding": "same"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_are_the_same_convolution(name):
    torch.manual_seed(0)
    layer = nn.Conv3d(**{**LAYERS[name], "groups": LAYERS[name]["in_channels"]}).double()
    x = torch.randn(2, layer.in_channels, 6, 8, 9, dtype=torch.double, requires_grad=True)
    size = block_size(layer.in_channels)

    def blocks(x, weight):
        dense = block_weight(weight, layer.in_channels, size)
        groups = layer.in_channels // size
        return nn.functional.conv3d(x, dense, layer.bias, layer.stride, layer.padding, layer.dilation, groups)

    expected, output = layer(x), blocks(x, layer.weight)
    torch.testing.assert_close(output, expected)
    sources = (x, layer.weight)
    grad = torch.randn_like(expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(output, sources, grad), torch.autograd.grad(expected, sources, grad), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_uses_the_blocks_and_agrees_with_fp32(autocast, monkeypatch):
    torch.manual_seed(0)
    plain = nn.Conv3d(32, 32, 3, padding=1, groups=32)
    network = nn.Sequential(deepcopy(plain))
    assert swap_depthwise(network) == 1
    x = torch.randn(1, 32, 8, 8, 8)
    expected = plain(x)
    calls = []
    convolve = nn.functional.conv3d
    monkeypatch.setattr(nn.functional, "conv3d", lambda *a: calls.append(a[-1]) or convolve(*a))
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            output = network(x)
    else:
        output = network.bfloat16()(x.bfloat16())
    assert output.dtype == torch.bfloat16 and calls == [2]
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)
    calls.clear()
    torch.testing.assert_close(network.float()(x), expected, rtol=0.02, atol=0.02)
    assert calls == [32]  # fp32: the convolution of torch


def test_mednext_keeps_its_names_and_results():
    torch.manual_seed(0)
    plain = nets.MedNeXt(
        3,
        init_filters=8,
        in_channels=1,
        out_channels=2,
        blocks_down=(1,),
        blocks_bottleneck=1,
        blocks_up=(1,),
    )
    network = deepcopy(plain)
    before = [parameter.data_ptr() for parameter in network.parameters()]
    assert swap_depthwise(network) >= 4
    assert [parameter.data_ptr() for parameter in network.parameters()] == before
    assert list(network.state_dict()) == list(plain.state_dict())
    x = torch.randn(1, 1, 16, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(network(x).float(), plain(x).float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv3d(8, 8, 3),
        nn.Conv3d(8, 8, 3, groups=4),
        nn.Conv3d(8, 8, 1, groups=8),
        nn.Conv3d(17, 17, 3, groups=17),
        nn.Conv3d(8, 8, 3, groups=8, padding=1, padding_mode="circular"),
        nn.Conv2d(8, 8, 3, groups=8),
    ],
    ids=str,
)
def test_layers_that_are_not_depthwise_or_would_not_be_faster_are_not_swapped(layer):
    assert swap_depthwise(nn.Sequential(layer)) == 0 and not isinstance(layer, BlockDepthwiseConv3d)


def test_whether_a_network_has_such_layers():
    network = nn.Sequential(nn.Conv3d(4, 4, 3, groups=4))
    assert has_depthwise(network)
    swap_depthwise(network)
    assert has_depthwise(network)
    assert not has_depthwise(nn.Sequential(nn.Conv3d(4, 4, 3), nn.Conv3d(4, 4, 1, groups=4)))
