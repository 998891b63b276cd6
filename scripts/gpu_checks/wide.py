"""Wide thin convolutions: several outputs along the last axis at once, as channels; not in the product yet.

A 3D convolution with 32 output channels is bound by the L2 cache: an implicit GEMM whose tile has 32 columns
reuses each value that it loads 32 times. With `width` outputs along the last axis as further channels, by
shifted copies of the kernel, the tile has `width` times as many columns for (width + 2) / 3 times the
operations. In channels-last, the memory of the output is that of the thin one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST


def wide_conv3d(x: Tensor, weight: Tensor, width: int) -> Tensor:
    """`F.conv3d(x, weight, padding=1)` in channels-last, `width` outputs along the last axis at once.

    Shape:
        x (N, C, D, H, W), weight (K, C, 3, 3, 3) -> (N, K, D, H, W), channels-last.
    Args:
        width: divides W; 1 is the plain convolution.
    Raises: ValueError: W is not a multiple of the width, or the kernel is not 3 x 3 x 3.
    """
    if tuple(weight.shape[2:]) != (3, 3, 3):
        raise ValueError(f"weight must be 3 x 3 x 3, got {tuple(weight.shape[2:])}")
    if x.shape[-1] % width:
        raise ValueError(f"the last axis must be a multiple of width {width}, got {x.shape[-1]}")
    result: Tensor = _WideConv.apply(x, weight, width)
    return result


class _WideConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.width = width
        return _thin(F.conv3d(x, _wide_kernel(weight, width), None, (1, 1, width), 1), width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last_3d)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            # a convolution again, with the flipped kernel, so it can be wide, too
            flipped = weight.flip(2, 3, 4).transpose(0, 1)
            x_grad = _thin(
                F.conv3d(grad, _wide_kernel(flipped, ctx.width), None, (1, 1, ctx.width), 1), ctx.width
            )
        if ctx.needs_input_grad[1]:
            weight_grad = _weight_gradient(x, grad, weight, ctx.width)
        return x_grad, weight_grad, None


def _wide_kernel(weight: Tensor, width: int) -> Tensor:
    """The kernel of all outputs in one step, of which each sees its own three positions.

    Shape: (K, C, 3, 3, 3) -> (width * K, C, 3, 3, width + 2), channels-last.
    """
    outputs, inputs = weight.shape[:2]
    shape = (width, outputs, inputs, 3, 3, width + 2)
    wide = weight.new_zeros(shape)
    for shift in range(width):
        wide[shift, ..., shift : shift + 3] = weight
    return wide.flatten(0, 1).contiguous(memory_format=torch.channels_last_3d)


def _thin(wide: Tensor, width: int) -> Tensor:
    """The same memory: (N, width * K, D, H, W / width) -> (N, K, D, H, W), both channels-last."""
    batch, channels, depth, height, steps = wide.shape
    last = wide.contiguous(memory_format=CHANNELS_LAST[5]).permute(0, 2, 3, 4, 1)
    return last.reshape(batch, depth, height, steps * width, channels // width).permute(0, 4, 1, 2, 3)


def _weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, width: int) -> Tensor:
    """The wide kernel's gradient, summed over the copies of the kernel in it."""
    batch, outputs, depth, height, length = grad.shape
    last = grad.permute(0, 2, 3, 4, 1)
    wide_grad = last.reshape(batch, depth, height, length // width, width * outputs).permute(0, 4, 1, 2, 3)
    kernel = _wide_kernel(weight, width)  # of which only the shape and the format count
    wide = torch.ops.aten.convolution_backward(
        wide_grad,
        x,
        kernel,
        None,
        [1, 1, width],
        [1, 1, 1],
        [1, 1, 1],
        False,
        [0, 0, 0],
        1,
        [False, True, False],
    )[1]
    copies = wide.unflatten(0, (width, outputs))
    return torch.stack([copies[shift, ..., shift : shift + 3] for shift in range(width)]).sum(0)
