"""Operations that PyTorch computes wrongly on CPUs, computed in another way.

Convolutions keep memory that was never written, or overwrite other memory (torch 2.13, oneDNN 3.12). The
output, where
- in bf16, a 3-D input is one voxel long, and the kernel longer, along the first axis;
- in bf16, a dilated kernel is longer than a 3-D input, or a transposed convolution is dilated or has a stride
  above its kernel: Python ends by a segmentation fault;
the gradient of the input, where
- a transposed 3-D convolution, in channels-last, gives one channel from one voxel along the last axis;
and the gradient of the weight, where
- in bf16 (AVX-512), a 3-D input is shorter than its kernel along an axis;
- in bf16, the last output axis has one element and a stride above 1; with AMX the output is wrong there, too
  (pytorch#169688);
- in fp32, kernels of 7 and more voxels have a stride along a first axis of less than twice their length;
- in fp32, kernels of one voxel with a stride have fewer input channels than a register has numbers, 8 on
  AVX2 and 16 on AVX-512, in channels-last.
These layers are small, so that a wider type costs little.

Group norm of channels-last tensors adds up all voxels and their squares one by one in fp32 and subtracts. Its
output is off by 4e-3 where the mean is 30 times the deviation, and in bf16 by a thousand where it is 300
times; with 32x32x32 voxels, most of them padding, by 3e-2. The contiguous layout is sound.

The gradient of a batch norm of one sample, which the instance norm of one sample is, too, is another one
where gradient and input differ in their strides: the stride of the only sample is taken for the layout.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.performance.kernel_gradients import convolution_backward

_REGISTER = 16  # fp32 numbers, at most
_libraries: list[torch.library.Library] = []  # torch's own kernels would return once it is garbage


def use_sound_kernels() -> None:
    """In this process, whatever calls them: eager, compiled or hand-written passes of any network."""
    if _libraries:
        return
    replacements = {
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "native_group_norm": _group_norm,
        "native_group_norm_backward": _group_norm_backward,
        "native_batch_norm_backward": _batch_norm_backward,
    }
    # torch warns of what is meant here: another kernel in the place of its own
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel.*")
        for name, replacement in replacements.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed  # torch's own
            library.impl(name, partial(replacement, kernel), "CPU", with_keyset=True)
    _libraries.append(library)


# All get torch's own kernel, the dispatch keys, and the arguments of the operation in `aten`, of which
# `settings` are passed on as they come.


def _convolution(
    kernel: Any, keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
) -> Tensor:
    stride, padding, dilation, transposed, *_ = settings
    if input.dtype != torch.bfloat16:
        return kernel(keys, input, weight, bias, *settings)  # type: ignore[no-any-return]
    extent = _extent(weight, dilation)
    if transposed:
        is_affected = _has_gaps(stride, dilation, extent)
    else:
        # by how much the kernel can move along the last axis
        slack = input.shape[-1] + 2 * padding[-1] - extent[-1]
        gives_one_element = stride[-1] > 1 and slack < stride[-1]
        is_flat_or_dilated = input.shape[2] == 1 or max(dilation) > 1
        is_affected = gives_one_element or (is_flat_or_dilated and _is_short(input.shape[2:], extent))
    if not is_affected:
        return kernel(keys, input, weight, bias, *settings)  # type: ignore[no-any-return]
    wide_bias = None if bias is None else bias.float()
    output: Tensor = kernel(keys, input.float(), weight.float(), wide_bias, *settings)
    return output.to(input.dtype)


def _convolution_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, weight: Tensor, *settings: Any
) -> tuple[Tensor | None, ...]:
    _, stride, _, dilation, transposed, *_ = settings
    # A transposed convolution slides over its output.
    fine, coarse = (grad, input) if transposed else (input, grad)
    dtype = _sound_type(
        input.dtype,
        channels=input.shape[1],
        fine_size=fine.shape[2:],
        coarse_size=coarse.shape[2:],
        extent=_extent(weight, dilation),
        stride=stride,
    )
    if transposed and input.ndim == 5 and weight.shape[1] == 1 and input.shape[-1] == 1:
        dtype = torch.float64
    elif transposed and dtype == torch.bfloat16 and _has_gaps(stride, dilation, _extent(weight, dilation)):
        dtype = torch.float32
    if dtype == input.dtype:
        return convolution_backward(partial(kernel, keys), grad, input, weight, *settings)
    grads = kernel(keys, grad.to(dtype), input.to(dtype), weight.to(dtype), *settings)
    # In the layout of torch's own, on which compiled code relies; fp64 gives contiguous gradients
    layout = next(
        (_layout(each) for each in (input, weight) if _layout(each) is not torch.contiguous_format),
        torch.contiguous_format,
    )
    input_grad, weight_grad, bias_grad = (None if each is None else each.to(input.dtype) for each in grads)
    return (
        None if input_grad is None else input_grad.contiguous(memory_format=layout),
        None if weight_grad is None else weight_grad.contiguous(memory_format=layout),
        bias_grad,
    )


def _sound_type(
    dtype: torch.dtype,
    channels: int,
    fine_size: Sequence[int],
    coarse_size: Sequence[int],
    extent: Sequence[int],
    stride: Sequence[int],
) -> torch.dtype:
    """The type in which the gradients are right.

    Args:
        channels: of the input.
        fine_size: spatial, of what the kernel slides over.
        coarse_size: spatial, of what it gives.
        extent: of the kernel, dilation included.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return dtype
    is_3d = len(fine_size) == 3
    # the last two cases of this module's docstring, where fp32 is wrong, too
    is_long_kernel = is_3d and extent[0] > 6 and stride[0] > 1 and fine_size[0] < 2 * extent[0]
    is_narrow_point = max(extent) == 1 and max(stride) > 1 and channels < _REGISTER
    if is_long_kernel or is_narrow_point:
        return torch.float64
    gives_one_element = coarse_size[-1] == 1 and stride[-1] > 1
    return torch.float32 if _is_short(fine_size, extent) or gives_one_element else dtype


def _has_gaps(stride: Sequence[int], dilation: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether a transposed convolution is dilated, or leaves voxels out."""
    return max(dilation) > 1 or any(step > reach for step, reach in zip(stride, extent, strict=True))


def _is_short(size: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether a 3-D input is shorter than the kernel along an axis."""
    return len(size) == 3 and any(voxels < reach for voxels, reach in zip(size, extent, strict=True))


def _extent(weight: Tensor, dilation: Sequence[int]) -> list[int]:
    """What the kernel spans along each axis, in voxels."""
    kernel_size = weight.shape[2:]
    return [(size - 1) * step + 1 for size, step in zip(kernel_size, dilation, strict=True)]


def _group_norm(
    kernel: Any, keys: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns: output, means, 1 / deviations."""
    output, mean, rstd = kernel(keys, input.contiguous(), weight, bias, *settings)
    return output.contiguous(memory_format=_layout(input)), mean, rstd


def _group_norm_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, *settings: Any
) -> tuple[Tensor | None, ...]:
    """Returns: gradients of input, weight and bias; None for those not needed."""
    grads = kernel(keys, grad.contiguous(), input.contiguous(), *settings)
    input_grad, weight_grad, bias_grad = grads
    if input_grad is not None:
        input_grad = input_grad.contiguous(memory_format=_layout(input))
    return input_grad, weight_grad, bias_grad


def _batch_norm_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, *settings: Any
) -> tuple[Tensor | None, ...]:
    if len(input) == 1 and grad.stride() != input.stride():
        grad = torch.empty_like(input, dtype=grad.dtype).copy_(grad)
    return kernel(keys, grad, input, *settings)  # type: ignore[no-any-return]


def _layout(input: Tensor) -> torch.memory_format:
    """The memory format to return: channels-last if the input has it, and not both."""
    channels_last = CHANNELS_LAST.get(input.ndim, torch.contiguous_format)
    is_channels_last = not input.is_contiguous() and input.is_contiguous(memory_format=channels_last)
    return channels_last if is_channels_last else torch.contiguous_format
