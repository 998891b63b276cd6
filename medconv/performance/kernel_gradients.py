"""Gradients of convolutions on CPUs, in other ways than oneDNN 3.12, where that is slow.

The bias of a transposed convolution, in channels-last: oneDNN takes two to six times as long for all of the
gradients with it as without. Here it is a plain sum.

The kernel, in bf16 with AMX: oneDNN fills tiles along the last axis of one image alone, so that 5 slices take
as long as 16, and the coarsest stages of a network as long as larger images. These ways are equal but for the
order of sums, and faster:
- few voxels, many channels: one product of matrices for the whole batch;
- a kernel of one voxel along a short last axis: a kernel of pictures, whose rows hold the last two axes,
  with gaps between its elements, which is the same memory;
- another kernel on a short last axis: copies of the image and its gradient, whose longest axis is the last.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.convs.parametrization import CHANNELS_LAST

_HAS_TILES = bool(torch.cpu.get_capabilities().get("amx_bf16"))
_TILE = 16  # voxels
_WORTH_COPIES = 1.5  # times as many voxels in a tile
# Where a product of matrices is no slower than the convolution
_MAX_VOXELS = 1024  # of a batch
_MIN_CHANNELS = 64
_MAX_TAPS = 27  # its operand has as many times the memory of the image

_Backward = Callable[..., tuple[Tensor | None, ...]]  # torch's own
_Layer = Sequence[Tensor]  # gradient of the output, input, weight


def convolution_backward(
    backward: _Backward, grad: Tensor, input: Tensor, weight: Tensor, *settings: Any
) -> tuple[Tensor | None, ...]:
    """`aten::convolution_backward`.

    Args:
        settings: bias sizes, stride, padding, dilation, transposed, output padding, groups, which gradients.
    """
    _, stride, padding, dilation, transposed, _, groups, needed = settings
    needs_input, needs_weight, needs_bias = needed
    # Its gradient is often a slice of channels, as the network joins its output to a skip connection
    if transposed and needs_bias and grad.stride(1) == 1 and not grad.is_contiguous():
        settings = *settings[:-1], [needs_input, needs_weight, False]
        input_grad, weight_grad, _ = backward(grad, input, weight, *settings)
        return input_grad, weight_grad, _bias_grad(grad)
    is_plain = not transposed and groups == 1 and max(stride) == 1
    has_tiles = _HAS_TILES and input.dtype == torch.bfloat16 and input.ndim in CHANNELS_LAST
    if not (has_tiles and needs_weight and is_plain and _is_channels_last(input)):
        return backward(grad, input, weight, *settings)
    size = input.shape[2:]
    is_thin = len(size) == 3 and size[-1] < _TILE
    layer = grad, input, weight
    if (
        len(input) * prod(size) <= _MAX_VOXELS
        and min(weight.shape[:2]) >= _MIN_CHANNELS
        and weight[0, 0].numel() <= _MAX_TAPS
    ):
        weight_grad = _by_matrices(layer, padding, dilation)
    elif is_thin and weight.shape[-1] == 1 and padding[-1] == 0:
        weight_grad = _by_pictures(backward, layer, padding, dilation)
    elif is_thin and min(_TILE, max(size)) >= _WORTH_COPIES * size[-1]:
        weight_grad = _along_longest_axis(backward, layer, padding, dilation)
    else:
        return backward(grad, input, weight, *settings)
    weight_grad = weight_grad.contiguous(memory_format=CHANNELS_LAST[input.ndim])
    input_grad = None
    if needs_input:
        input_grad, *_ = backward(grad, input, weight, *settings[:-1], [True, False, False])
    return input_grad, weight_grad, _bias_grad(grad) if needs_bias else None


def _by_matrices(layer: _Layer, padding: Sequence[int], dilation: Sequence[int]) -> Tensor:
    grad, input, weight = layer
    margins = [margin for axis in reversed(padding) for margin in (axis, axis)]
    padded = F.pad(_channels_at_end(input), [0, 0, *margins])
    batch_step, *steps, _ = padded.stride()
    tap_steps = [step * distance for step, distance in zip(steps, dilation, strict=True)]
    kernel_size = weight.shape[2:]
    seen_by_voxels = padded.as_strided(
        (len(input), *grad.shape[2:], *kernel_size, input.shape[1]), (batch_step, *steps, *tap_steps, 1)
    )
    num_voxels = grad.numel() // grad.shape[1]
    weight_grad = torch.mm(  # (out, taps * in)
        _channels_at_end(grad).reshape(num_voxels, -1).t(), seen_by_voxels.reshape(num_voxels, -1)
    )
    return weight_grad.view(len(weight), *kernel_size, -1).movedim(-1, 1)


def _by_pictures(
    backward: _Backward, layer: _Layer, padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    grad, input, weight = layer
    num_slices = input.shape[-1]
    pictures = [_channels_at_end(image).flatten(2, 3).movedim(-1, 1) for image in (grad, input)]
    in_rows = [[first, second * num_slices] for first, second, _ in (padding, dilation)]
    return _weight_grad(backward, (*pictures, weight[..., 0]), *in_rows)[..., None]


def _along_longest_axis(
    backward: _Backward, layer: _Layer, padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    _, input, _ = layer
    axes = sorted(range(3), key=lambda axis: input.shape[2 + axis])
    turned = [
        each.permute(0, 1, *(2 + axis for axis in axes)).contiguous(memory_format=torch.channels_last_3d)
        for each in layer
    ]
    settings = [[setting[axis] for axis in axes] for setting in (padding, dilation)]
    weight_grad = _weight_grad(backward, turned, *settings)
    return weight_grad.permute(0, 1, *(2 + axes.index(axis) for axis in range(3)))


def _weight_grad(backward: _Backward, layer: _Layer, padding: list[int], dilation: list[int]) -> Tensor:
    ones, zeros = [1] * len(padding), [0] * len(padding)
    settings = None, ones, padding, dilation, False, zeros, 1, [False, True, False]
    _, weight_grad, _ = backward(*layer, *settings)
    assert weight_grad is not None
    return weight_grad


def _bias_grad(grad: Tensor) -> Tensor:
    return grad.sum([0, *range(2, grad.ndim)])


def _channels_at_end(image: Tensor) -> Tensor:
    """(batch, channels, *spatial) -> (batch, *spatial, channels), the same memory in channels-last."""
    return image.movedim(1, -1)


def _is_channels_last(image: Tensor) -> bool:
    """Whether it is, and not contiguous as well, as a single pixel is."""
    return not image.is_contiguous() and image.is_contiguous(memory_format=CHANNELS_LAST[image.ndim])
