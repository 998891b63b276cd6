"""What a convolution costs: operations, bytes and launches, and the seconds they predict.

Operations alone mislead: thin convolutions are limited by memory and by the time that a launch takes, and the
matrix units of CPUs and GPUs work on whole tiles of channels. The prediction is a roofline (Williams et al.
2009, doi:10.1145/1498765.1498785) with a fixed time per launch added.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import torch


@dataclass(frozen=True)
class Launch:
    """One library call.

    Args:
        operations: multiply-adds.
        tiled_operations: multiply-adds with channels padded to whole tiles.
        bytes: read and written.
        passes: how often it runs in a training step: once forward, once for each gradient needed.
    """

    operations: float
    tiled_operations: float
    bytes: float
    passes: int = 1


@dataclass(frozen=True)
class Machine:
    """Speed of a device.

    Args:
        operations_per_second: multiply-adds of the matrix units.
        bytes_per_second: of main memory, or of a GPU's.
        seconds_per_launch: fixed time to start a library call.
        tile: (input, output) channels that the matrix units process at a time.
        bytes_per_element: of images and weights.
        fp32_slowdown: how many times as long a multiply-add in fp32 takes.
    """

    operations_per_second: float
    bytes_per_second: float
    seconds_per_launch: float
    tile: tuple[int, int]
    bytes_per_element: float = 2.0
    fp32_slowdown: float = 10.0

    def seconds(self, launches: Iterable[Launch]) -> float:
        """Each launch takes as long as its slower part, arithmetic or memory, and a fixed time to start."""
        return sum(
            launch.passes * (self._busy_seconds(launch) + self.seconds_per_launch) for launch in launches
        )

    def _busy_seconds(self, launch: Launch) -> float:
        arithmetic = launch.tiled_operations / self.operations_per_second
        memory = launch.bytes / self.bytes_per_second
        return max(arithmetic, memory)


# Orders of magnitude, for choosing between two ways to compute the same result. Constants for each precision
# and instruction set, so that a run depends on no measurement: a resumed one takes the same way.
CPU_AMX = Machine(  # 2 cores, bf16
    operations_per_second=1.0e12, bytes_per_second=3.0e10, seconds_per_launch=2.0e-5, tile=(16, 16)
)
CPU_FP32 = Machine(  # 2 cores of an AMD EPYC with AVX-512
    operations_per_second=2.6e11,
    bytes_per_second=3.0e10,
    seconds_per_launch=2.0e-5,
    tile=(16, 16),  # channels lie in blocks of 16
    bytes_per_element=4.0,
    fp32_slowdown=1.0,
)
# the same cores, two products of bf16 in one instruction
CPU_BF16 = replace(CPU_FP32, operations_per_second=5.2e11, bytes_per_element=2.0, fp32_slowdown=2.0)
CUDA = Machine(  # like an A100, bf16; not measured yet
    operations_per_second=1.0e14, bytes_per_second=1.5e12, seconds_per_launch=8.0e-6, tile=(16, 8)
)
_HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))
# fp32 written (4), read again for the cast (4), and bf16 written (2)
_PREPARED_BYTES_PER_ELEMENT = 10.0


def machine_of(device: torch.device, dtype: torch.dtype) -> Machine:
    """The constants for a device.

    Args: dtype: that convolutions are computed in, see `computed_in`; a GPU's constants are those of bf16.
    """
    if device.type == "cuda":
        return CUDA
    if dtype != torch.bfloat16:
        return CPU_FP32
    return CPU_AMX if _HAS_AMX else CPU_BF16


def computed_in(x: torch.Tensor) -> torch.dtype:
    """The type that a convolution of this input is computed in, autocast included."""
    device = x.device.type
    # meta cannot even be asked; torch 2.11 cannot compile a call of `is_autocast_available`
    is_cast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: Sequence[int],
    in_voxels: int,
    out_voxels: int,
    groups: int = 1,
    machine: Machine = CPU_AMX,
    passes: int = 1,
) -> Launch:
    """The cost of one convolution.

    Args:
        in_voxels: of the input, counted over the whole batch.
        out_voxels: of the output, counted over the whole batch.
        machine: whose tiles the channels of a group are padded to, and whose elements are moved.
        passes: as of `Launch`.
    """
    taps = prod(kernel_size)
    group_in = in_channels // groups
    group_out = out_channels // groups
    tile_in, tile_out = machine.tile
    # matrix units compute whole tiles, also for the channels that are not there
    padded_in = ceil(group_in / tile_in) * tile_in
    padded_out = ceil(group_out / tile_out) * tile_out
    weights = out_channels * group_in * taps
    # image in, image out and weights, each once: caches hold the taps' overlap
    moved_elements = in_channels * in_voxels + out_channels * out_voxels + weights
    return Launch(
        operations=float(out_voxels * weights),
        tiled_operations=float(out_voxels * taps * groups * padded_in * padded_out),
        bytes=machine.bytes_per_element * moved_elements,
        passes=passes,
    )


def weight_preparation(elements: int, operations: float, machine: Machine, passes: int = 1) -> Launch:
    """The cost of computing a dense kernel in fp32: it is written, read for the cast, and written again.

    Args:
        elements: of the kernel.
        operations: multiply-adds that compute it.
        machine: on which fp32 is slower than what it convolves in.
        passes: as of `Launch`.
    """
    return Launch(
        operations=operations,
        tiled_operations=operations * machine.fp32_slowdown,
        bytes=elements * _PREPARED_BYTES_PER_ELEMENT,
        passes=passes,
    )
