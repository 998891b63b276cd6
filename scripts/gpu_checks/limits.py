"""What the hardware allows: bytes over bandwidth and operations over peak, of one operation and of a network.

Peaks are those of the data sheets, dense, of the SXM boards, links in one direction: a matrix product reaches
about 80 % of them, a copy about 90 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpu_checks.setting import in_own_process


@dataclass(frozen=True)
class Peaks:
    """Bytes and bf16 operations a second. host: bytes from the host, by PCIe; peer: from a GPU, by NVLink."""

    name: str
    bandwidth: float
    bf16: float
    host: float
    peer: float

    def seconds(self, moved: float = 0.0, operations: float = 0.0) -> float:
        """Of one operation that moves so many bytes; the slower of the two."""
        return max(moved / self.bandwidth, operations / self.bf16)


H100 = Peaks("H100", 3.35e12, 989e12, 64e9, 450e9)
_KNOWN = (H100, Peaks("H200", 4.8e12, 989e12, 64e9, 450e9), Peaks("A100", 2.04e12, 312e12, 32e9, 300e9))


def peaks_of(hardware: str) -> Peaks:
    """By the name that CUDA gives; those of an H100 for any other, so that a limit always stands there."""
    return next((peaks for peaks in _KNOWN if peaks.name in hardware), H100)


# How often batch norm, with its activation, reads or writes a tensor like its input: forward it reads x twice
# and writes y, backward it reads both tensors twice and writes one.
_NORM_PASSES = {torch.ops.aten.native_batch_norm: 3, torch.ops.aten.native_batch_norm_backward: 5}


class _Layers(TorchDispatchMode):
    """Notes bytes and operations of every convolution, matrix product and batch norm, also backward."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[float, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            moved = sum(t.numel() * t.element_size() for t in tensors)
            self.work.append((moved, count(*args, **(kwargs or {}), out_val=result)))
        passes = _NORM_PASSES.get(func._overloadpacket, 0)
        if passes:
            self.work.append((passes * result[0].numel() * result[0].element_size(), 0.0))
        return result


@cache
def step_work(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = True,
) -> tuple[tuple[float, float], ...]:
    """Bytes and operations of each convolution and batch norm of a training step; no tensor is made.

    In a process of its own: a backward pass begins CUDA where there is a GPU, and a process that has seen
    CUDA must not be forked.
    Shape: (batch, channels, *spatial). Other norms, sums and the optimizer come on top: the limit is a lower
    bound. Args: backward: else of a prediction, in which norms count as in training.
    """
    work: tuple[tuple[float, float], ...] = in_own_process(
        f"counting the work of {shape}", partial(_counted, build, shape, dtype, backward)
    )
    return work


def _counted(
    build: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, backward: bool
) -> tuple[tuple[float, float], ...]:
    with torch.device("meta"):
        network = build().to(dtype)
        image = torch.empty(shape, dtype=dtype)
    with _Layers() as counted:
        output = network(image)
        if backward:
            output.sum().backward()
    return tuple(counted.work)


def step_seconds(peaks: Peaks, work: Sequence[tuple[float, float]]) -> float:
    """Each layer at its own limit, one after another."""
    return sum(peaks.seconds(moved, operations) for moved, operations in work)


def newton_schulz_seconds(peaks: Peaks, shapes: Sequence[tuple[int, int]]) -> float:
    """Of Muon's orthogonalisation of matrices (rows, columns), as `orthogonal` does it.

    In each of two passes a Gram matrix and a product with the matrix; 14 products of small matrices in all.
    """
    operations = 0.0
    for shape in shapes:
        short, long = sorted(shape)
        operations += 8.0 * short * short * long + 28.0 * short**3
    return peaks.seconds(operations=operations)
