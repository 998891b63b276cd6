"""Group norm of channels-last tensors on a CPU, which PyTorch computes by the difference of large sums.

Its error grows with the square of mean over deviation: at 30 the fp32 output is off by 4e-3, at 300 a bf16
one by a thousand (torch 2.13). So a mean is subtracted before, in the forward pass that of some voxels; the
output stays channels-last, and the statistics are those of the input.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

_SOME = 256  # voxels of a sample whose mean is near enough
_libraries: list[torch.library.Library] = []  # torch's own kernels would return once it is garbage


def use_sound_group_norm() -> None:
    """In this process, whatever calls it."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel.*")
        for name, sound in (("native_group_norm", _norm), ("native_group_norm_backward", _norm_backward)):
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, partial(sound, kernel), "CPU", with_keyset=True, allow_override=True)
    _libraries.append(library)


def _norm(
    kernel: Any, keys: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Args: rest: samples, channels, voxels, groups, eps. Returns: output, means, 1 / deviations."""
    if input.is_contiguous() or not input.numel():
        return kernel(keys, input, weight, bias, *rest)  # type: ignore[no-any-return]
    samples, _, voxels, groups, _ = rest
    some = input.movedim(1, -1).flatten(1, -2)[:, :: max(1, voxels // _SOME)]
    shifted, shift = _minus(input, some.float().reshape(samples, some.shape[1], groups, -1).mean((1, 3)))
    output, means, inverse = kernel(keys, shifted, weight, bias, *rest)
    return output, means + shift.to(means.dtype), inverse


def _norm_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, means: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    if input.is_contiguous() or not input.numel():
        return kernel(keys, grad, input, means, *rest)  # type: ignore[no-any-return]
    shifted, shift = _minus(input, means)
    return kernel(keys, grad, shifted, means - shift.to(means.dtype), *rest)  # type: ignore[no-any-return]


def _minus(input: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """The input minus a value of each group, rounded to its type, and these values. Shape: (N, groups)."""
    shift = means.to(input.dtype)
    channels = shift.repeat_interleave(input.shape[1] // shift.shape[1], 1)
    return input - channels.reshape(*channels.shape, *[1] * (input.ndim - 2)), shift
