"""Convolutions that oneDNN computes wrongly on CPUs, computed in a wider type instead.

The gradient of a weight keeps memory that was never written, or other memory is overwritten, where
- in bf16 (AVX-512), a 3-D input is shorter than its kernel along an axis;
- in bf16, the last output axis has one element and a stride above 1; with AMX the output is wrong there, too
  (pytorch#169688);
- in fp32, kernels of 7 and more voxels have a stride along a first axis of less than twice their length.

Seen with oneDNN 3.12 of torch 2.13. These layers are small, so that the wider type costs little.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []  # torch's own kernels would return once it is garbage


def use_sound_convolutions() -> None:
    """In this process, whatever calls them: eager, compiled or hand-written passes of any network."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    for name, sound in (("convolution", _convolution), ("convolution_backward", _convolution_backward)):
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
