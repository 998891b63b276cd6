"""Depthwise 3-D convolutions on a CPU with fast bf16: dense blocks, zero between different channels.

PyTorch has no fast depthwise `Conv3d` (pytorch#110885, #37406), while matrix units multiply sixteen channels
in the time of one: a grouped convolution whose blocks are mostly zeros is exact and many times faster.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 16  # channels; `python scripts/benchmark.py layers --parts depthwise` compares it with others


class BlockDepthwiseConv3d(nn.Conv3d):
    """A depthwise `nn.Conv3d`: dense blocks for bf16 on a CPU, else torch's own convolution.

    Shape:
        (batch, channels, D, H, W) -> (batch, multiplier * channels, D', H', W').
    """

    def forward(self, input: Tensor) -> Tensor:
        is_autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if is_autocast else input.dtype
        if input.device.type != "cpu" or dtype != torch.bfloat16:
            return super().forward(input)
        # computed in each call, so that parameters, state dict and gradients stay those of a depthwise layer
        size = block_size(self.in_channels)
        weight = block_weight(self.weight, self.in_channels, size)
        return F.conv3d(
            input,
            weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.in_channels // size,  # groups
        )


def swap_depthwise(network: nn.Module) -> int:
    """Make every depthwise `nn.Conv3d` a BlockDepthwiseConv3d, in place; returns their number."""
    swapped = 0
    for layer in network.modules():
        # not of subclasses, which may have a forward of their own
        if type(layer) is nn.Conv3d and layer.groups > 1 and _suits(layer):
            layer.__class__ = BlockDepthwiseConv3d
            swapped += 1
    return swapped


def has_depthwise(network: nn.Module) -> bool:
    """Whether the network has convolutions that `swap_depthwise` exchanges, or has exchanged."""
    convs = (layer for layer in network.modules() if isinstance(layer, nn.Conv3d) and layer.groups > 1)
    return any(map(_suits, convs))


def block_size(channels: int) -> int:
    """The largest divisor of `channels` up to BLOCK."""
    return max(size for size in range(1, BLOCK + 1) if channels % size == 0)


def block_weight(weight: Tensor, channels: int, size: int) -> Tensor:
    """The dense blocks of a depthwise kernel.

    Output o of a block sees input i of it through the weight where o belongs to i, and zeros elsewhere.

    Shape:
        (multiplier * channels, 1, d, h, w) -> (multiplier * channels, size, d, h, w), channels-last.
    """
    multiplier = weight.shape[0] // channels
    kernel_size = weight.shape[2:]
    # (outputs of a block, inputs of a block): 1 where an output belongs to an input
    identity = torch.eye(size, dtype=weight.dtype, device=weight.device)
    belongs = identity.repeat_interleave(multiplier, 0)
    by_block = weight.view(-1, size * multiplier, 1, *kernel_size)
    blocks = by_block * belongs[None, :, :, None, None, None]
    return blocks.flatten(0, 1).contiguous(memory_format=torch.channels_last_3d)


def _suits(layer: nn.Conv3d) -> bool:
    is_depthwise = layer.groups == layer.in_channels > 1
    is_spatial = any(size > 1 for size in layer.kernel_size)
    is_usual = is_depthwise and is_spatial and layer.padding_mode == "zeros"
    return is_usual and block_size(layer.in_channels) > 1
