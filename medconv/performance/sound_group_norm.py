"""Group norm of channels-last tensors on a CPU, computed in the other layout.

PyTorch's own kernel adds up all voxels and their squares one by one in fp32 and subtracts (torch 2.13). Its
output is off by 4e-3 where the mean is 30 times the deviation, and in bf16 by a thousand where it is 300
times; with 32x32x32 voxels, most of them padding, by 3e-2.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST

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
            library.impl(name, partial(sound, kernel), "CPU", with_keyset=True)
    _libraries.append(library)


def _norm(
    kernel: Any, keys: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns: output, means, 1 / deviations."""
    output, *statistics = kernel(keys, input.contiguous(), weight, bias, *rest)
    return output.contiguous(memory_format=_layout(input)), *statistics


def _norm_backward(
    kernel: Any, keys: Any, grad: Tensor, input: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    of_input, *others = kernel(keys, grad.contiguous(), input.contiguous(), *rest)
    return None if of_input is None else of_input.contiguous(memory_format=_layout(input)), *others


def _layout(input: Tensor) -> torch.memory_format:
    layout = CHANNELS_LAST.get(input.ndim, torch.contiguous_format)
    is_last = not input.is_contiguous() and input.is_contiguous(memory_format=layout)
    return layout if is_last else torch.contiguous_format
