"""Operations that PyTorch computes wrongly on CPUs, computed in another way.

The gradient of a convolution's weight keeps memory that was never written, or overwrites other memory
(torch 2.13, oneDNN 3.12), where
- in bf16 (AVX-512), a 3-D input is shorter than its kernel along an axis;
- in bf16, the last output axis has one element and a stride above 1; with AMX the output is wrong there, too
  (pytorch#169688);
- in fp32, kernels of 7 and more voxels have a stride along a first axis of less than twice their length.
These layers are small, so that a wider type costs little.

Group norm of channels-last tensors adds up all voxels and their squares one by one in fp32 and subtracts. Its
output is off by 4e-3 where the mean is 30 times the deviation, and in bf16 by a thousand where it is 300
times; with 32x32x32 voxels, most of them padding, by 3e-2. The contiguous layout is sound.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST

_libraries: list[torch.library.Library] = []  # torch's own kernels would return once it is garbage


def use_sound_kernels() -> None:
    """In this process, whatever calls them: eager, compiled or hand-written passes of any network."""
    if _libraries:
        return
    kernels = {"convolution": _convolution, "convolution_backward": _convolution_backward}
    kernels |= {"native_group_norm": _group_norm, "native_group_norm_backward": _group_norm_backward}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel.*")
        for name, sound in kernels.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, partial(sound, kernel), "CPU", with_keyset=True)
    _libraries.append(library)


def _convolution(
    kernel: Any, keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor:
    stride, padding, dilation, transposed, *_ = rest
    if input.dtype == torch.bfloat16 and not transposed and stride[-1] > 1:
        room = input.shape[-1] + 2 * padding[-1] - _extent(weight, dilation)[-1]
        if room < stride[-1]:
            wide = (input.float(), weight.float(), None if bias is None else bias.float())
            return kernel(keys, *wide, *rest).to(input.dtype)  # type: ignore[no-any-return]
    return kernel(keys, input, weight, bias, *rest)  # type: ignore[no-any-return]


def _convolution_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    _, stride, _, dilation, transposed, *_ = rest
    sizes = [grad.shape[2:], input.shape[2:]]
    large, small = sizes if transposed else reversed(sizes)
    wide = _sound_type(input.dtype, large, small[-1] == 1, _extent(weight, dilation), stride)
    if wide == input.dtype:
        return kernel(keys, grad, input, weight, *rest)  # type: ignore[no-any-return]
    grads = kernel(keys, grad.to(wide), input.to(wide), weight.to(wide), *rest)
    return tuple(None if grad is None else grad.to(input.dtype) for grad in grads)


def _sound_type(
    dtype: torch.dtype, size: Sequence[int], to_one: bool, extent: list[int], stride: Sequence[int]
) -> torch.dtype:
    """Args: size: of what the kernel slides over. to_one: the last axis of what it gives has one element."""
    if dtype not in (torch.bfloat16, torch.float32):
        return dtype
    if len(size) == 3 and extent[0] > 6 and stride[0] > 1 and size[0] < 2 * extent[0]:
        return torch.float64
    short = len(size) == 3 and any(n < length for n, length in zip(size, extent, strict=True))
    return torch.float32 if short or (to_one and stride[-1] > 1) else dtype


def _extent(weight: Tensor, dilation: Sequence[int]) -> list[int]:
    """What the kernel spans along each axis."""
    return [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilation, strict=True)]


def _group_norm(
    kernel: Any, keys: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns: output, means, 1 / deviations."""
    output, *statistics = kernel(keys, input.contiguous(), weight, bias, *rest)
    return output.contiguous(memory_format=_layout(input)), *statistics


def _group_norm_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    of_input, *others = kernel(keys, grad.contiguous(), input.contiguous(), *rest)
    return None if of_input is None else of_input.contiguous(memory_format=_layout(input)), *others


def _layout(input: Tensor) -> torch.memory_format:
    layout = CHANNELS_LAST.get(input.ndim, torch.contiguous_format)
    is_last = not input.is_contiguous() and input.is_contiguous(memory_format=layout)
    return layout if is_last else torch.contiguous_format
