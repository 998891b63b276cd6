"""What a convolution costs: operations, bytes and launches, and the seconds they predict.

Operations alone mislead: thin convolutions are limited by memory and by the time that a launch takes, and the
matrix units of CPUs and GPUs work on whole tiles of channels. The prediction is a roofline over those three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch


@dataclass(frozen=True)
class Launch:
    """One library call: multiply-adds as asked for, as the matrix units carry them out, and the bytes it
    moves.

    Args: passes: how often it runs in a training step: forward, and once more for the gradient of its input
        and of its weight, where they are wanted.
    """

    operations: float
    tiled_operations: float
    bytes: float
    passes: int = 1


@dataclass(frozen=True)
class Machine:
    """Rates of a device: multiply-adds a second, bytes a second, seconds a launch; channels of a tile (in,
    out).
    """

    operations_per_second: float
    bytes_per_second: float
    seconds_per_launch: float
    tile: tuple[int, int]

    def seconds(self, launches: Iterable[Launch]) -> float:
        """Each launch takes as long as its slower part, arithmetic or memory, and a fixed time to start."""
        return sum(
            x.passes * (max(self._arithmetic(x), self._memory(x)) + self.seconds_per_launch) for x in launches
        )

    def _arithmetic(self, launch: Launch) -> float:
        return launch.tiled_operations / self.operations_per_second

    def _memory(self, launch: Launch) -> float:
        return launch.bytes / self.bytes_per_second


# Orders of magnitude for choosing between two ways of computing the same; fixed, so that a run does not
# depend on what a measurement gave that day. CPU: 2 cores with AMX, bf16. CUDA: of the size of an A100, bf16;
# not measured yet.
CPU = Machine(1.0e12, 3.0e10, 2.0e-5, (16, 16))
CUDA = Machine(1.0e14, 1.5e12, 8.0e-6, (16, 8))
_FP32 = 10  # times as long as a tiled multiply-add takes one in fp32, outside of the matrix units


def machine_of(device: torch.device) -> Machine:
    return CUDA if device.type == "cuda" else CPU


def convolution(
    in_channels: int,
    out_channels: int,
    kernel_size: Sequence[int],
    in_voxels: int,
    out_voxels: int,
    groups: int = 1,
    element_bytes: int = 2,
    machine: Machine = CPU,
    passes: int = 1,
) -> Launch:
    """The cost of one convolution, bf16 by default; voxels are counted over the whole batch."""
    taps = prod(kernel_size)
    into, out = in_channels // groups, out_channels // groups
    tile_in, tile_out = machine.tile
    padded = groups * ceil(into / tile_in) * tile_in * ceil(out / tile_out) * tile_out
    moved = in_channels * in_voxels + out_channels * out_voxels + out_channels * into * taps
    return Launch(
        float(out_voxels * out_channels * into * taps),
        float(out_voxels * taps * padded),
        float(moved * element_bytes),
        passes,
    )


def weight_preparation(elements: int, operations: float, passes: int = 1) -> Launch:
    """Computing a dense kernel in fp32: written, read once more for the cast, and written again."""
    return Launch(operations, operations * _FP32, elements * 10.0, passes)
