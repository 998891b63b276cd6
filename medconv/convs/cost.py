"""What a convolution costs: operations, bytes and launches, and the seconds they predict.

Operations alone mislead: thin convolutions are limited by memory and by the time that a launch takes, and the matrix
units of CPUs and GPUs work on whole tiles of channels. The prediction is a roofline over those three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch


@dataclass(frozen=True)
class Launch:
    """One library call: multiply-adds as asked for, as the matrix units carry them out, and the bytes it moves."""

    operations: float
    tiled_operations: float
    bytes: float


@dataclass(frozen=True)
class Machine:
    """Rates of a device: multiply-adds a second, bytes a second, seconds a launch; channels of a tile (in, out)."""

    operations_per_second: float
    bytes_per_second: float
    seconds_per_launch: float
    tile: tuple[int, int]

    def seconds(self, launches: Iterable[Launch]) -> float:
        """Each launch takes as long as its slower part, arithmetic or memory, and a fixed time to start."""
        return sum(
            max(x.tiled_operations / self.operations_per_second, x.bytes / self.bytes_per_second) + self.seconds_per_launch
            for x in launches
        )


# Orders of magnitude for choosing between two ways of computing the same; fixed, so that a run does not depend on what
# a measurement gave that day. CPU: 2 cores with AMX, bf16. CUDA: of the size of an A100, bf16; not measured yet.
CPU = Machine(1.0e12, 2.0e10, 2.0e-5, (32, 16))
CUDA = Machine(1.0e14, 1.5e12, 8.0e-6, (16, 8))


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
) -> Launch:
    """The cost of one forward convolution; voxels are counted over the whole batch."""
    taps = prod(kernel_size)
    into, out = in_channels // groups, out_channels // groups
    tile_in, tile_out = machine.tile
    padded = groups * ceil(into / tile_in) * tile_in * ceil(out / tile_out) * tile_out
    moved = in_channels * in_voxels + out_channels * out_voxels + out_channels * into * taps
    return Launch(
        float(out_voxels * out_channels * into * taps),
        float(out_voxels * taps * padded),
        float(moved * element_bytes),
    )


def weight_preparation(elements: int, operations: float) -> Launch:
    """Computing a dense kernel in fp32, casting it, and the same way back for its gradient."""
    return Launch(operations, operations, elements * 12.0)
