"""The convolution block of our networks."""

import pytest
import torch
from torch import nn

from medconv.models.unet import ConvBlock


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm3d), ("instance", nn.InstanceNorm3d)])
def test_a_block_repeats_convolution_norm_and_leaky_relu(norm, kind):
    block = ConvBlock(3, [2, 4, 6], (3, 1, 5), norm)
    assert [type(layer) for layer in block] == [nn.Conv3d, kind, nn.LeakyReLU] * 2
    convs, norms = list(block)[::3], list(block)[1::3]
    assert [(conv.in_channels, conv.out_channels) for conv in convs] == [(2, 4), (4, 6)]
    assert all(conv.kernel_size == (3, 1, 5) and conv.padding == (1, 0, 2) for conv in convs)
    assert all(conv.bias is None for conv in convs)  # the norm has one
    assert [layer.bias.shape for layer in norms] == [(4,), (6,)]
    assert block(torch.randn(2, 2, 4, 3, 6)).shape == (2, 6, 4, 3, 6)


def test_a_block_can_be_sliced():
    block = ConvBlock(2, [1, 2, 3], (3, 3), "batch")
    assert list(block[3:]) == list(block)[3:] and block[-1] is list(block)[-1]
