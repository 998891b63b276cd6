"""What a convolution costs: operations, bytes and launches, and the seconds they predict.

Operations alone mislead: thin convolutions are limited by memory and by the time that a launch takes, and the
matrix units of CPUs and GPUs work on whole tiles of channels. The prediction is a roofline over those three.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch


@dataclass(frozen=True)
class Launch:
    """One library call: its multiply-adds, the same padded to whole tiles, and the bytes it moves.

    Args: passes: how often it runs in a training step: once forward, once for each gradient needed.
    """

    operations: float
    tiled_operations: float
    bytes: float
    passes: int = 1


@dataclass(frozen=True)
class Machine:
    """Speed of a device. Args: tile: (input, output) channels that its matrix units process at a time."""

    operations_per_second: float
    bytes_per_second: float
    seconds_per_launch: float
    tile: tuple[int, int]

    def seconds(self, launches: Iterable[Launch]) -> float:
        """Each launch takes as long as its slower part, arithmetic or memory, and a fixed time to start."""

        def busy(launch: Launch) -> float:
            arithmetic = launch.tiled_operations / self.operations_per_second
            return max(arithmetic, launch.bytes / self.bytes_per_second)

        return sum(x.passes * (busy(x) + self.seconds_per_launch) for x in launches)


# Orders of magnitude, for choosing between two ways to compute the same result; constants, so that a run
# does not depend on a measurement. CPU: 2 cores with AMX, bf16. CUDA: like an A100, bf16; not measured yet.
CPU = Machine(1.0e12, 3.0e10, 2.0e-5, (16, 16))
CUDA = Machine(1.0e14, 1.5e12, 8.0e-6, (16, 8))
_FP32 = 10  # a multiply-add in fp32, without the matrix units, takes this many times as long


def machine_of(device: torch.device) -> Machine:
    return CUDA if device.type == "cuda" else CPU


def convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: Sequence[int],
    in_voxels: int,
    out_voxels: int,
    groups: int = 1,
    machine: Machine = CPU,
    passes: int = 1,
) -> Launch:
    """The cost of one convolution, in bf16; voxels are counted over the whole batch."""
    taps = prod(kernel_size)
    into, out = in_channels // groups, out_channels // groups
    tile_in, tile_out = machine.tile
    padded = groups * ceil(into / tile_in) * tile_in * ceil(out / tile_out) * tile_out
    moved = in_channels * in_voxels + out_channels * out_voxels + out_channels * into * taps
    return Launch(
        float(out_voxels * out_channels * into * taps),
        float(out_voxels * taps * padded),
        2.0 * moved,
        passes,
    )


def weight_preparation(elements: int, operations: float, passes: int = 1) -> Launch:
    """The cost of computing a dense kernel in fp32: it is written, read for the cast, and written again."""
    return Launch(operations, operations * _FP32, elements * 10.0, passes)
