"""Launches the Triton kernels of the channels-last norms; imported only where Triton runs."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.models.layers import triton_norm_kernels as kernels

_TILE = 2048  # elements: 16 per thread
_MAX_COLUMNS = 64  # 128 bytes of bf16
# Programs of the reductions for each multiprocessor: those that it runs at once, with their registers.
_MOMENT_PROGRAMS = 7
_GRADIENT_PROGRAMS = 5
_A100_MULTIPROCESSORS = 108
_TILES = 4  # of a program that changes tiles one by one: numbers of a channel are combined once for them
_WAVES = 8  # programs for each multiprocessor; with fewer of them a program has one tile
_MAX_CHUNKS = 1024  # that one program merges
_MIN_STEPS = 4  # tiles of a chunk, so that its partial result is small beside what it reads
_MERGED_COLUMNS = 4  # channels of a program that merges


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None,
    eps: float,
    negative_slope: float | None,
    over_batch: bool,
    groups: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, scale, shift and activate.

    Shape:
        x (N, C, *spatial) -> the same, channels-last; mean and variance, each (N, C), (1, C) over the batch.
    Args:
        statistics: mean and variance (C,) in place of those of x; only over the batch.
        over_batch: statistics over samples and voxels, not of each sample.
        groups: of channels that share their statistics; 0: each channel has its own.
    """
    x = dense(x)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        mean, variance = _statistics(x, over_batch) if statistics is None else statistics
        if groups:
            mean, variance = _of_groups(mean, variance, groups)
        plan = Plan(x, over_batch)
        kernels.normalise[plan.tile_grid](
            x,
            mean,
            variance,
            weight,
            bias,
            y,
            plan.voxels,
            plan.channels,
            EPS=eps,
            SLOPE=negative_slope,
            TILES=plan.tiles,
            **plan.tile,
        )
    return y, mean, variance


def _statistics(x: Tensor, over_batch: bool) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, each (N, C) or (1, C)."""
    plan = Plan(x, over_batch)
    # per chunk: mean, and sum of squared deviations from it
    means, squares = plan.empty(2, plan.samples, plan.chunks, plan.channels).unbind()
    mean = plan.empty(plan.samples, plan.channels)
    variance = plan.empty(plan.samples, plan.channels)
    merge_grid = (triton.cdiv(plan.channels, _MERGED_COLUMNS), plan.samples)
    kernels.moments[plan.chunk_grid](x, means, squares, plan.voxels, plan.channels, plan.steps, **plan.tile)
    kernels.merge[merge_grid](
        means,
        squares,
        mean,
        variance,
        plan.voxels,
        plan.channels,
        plan.chunks,
        plan.steps * plan.rows,  # voxels of a chunk; the last may have fewer
        CHUNKS=triton.next_power_of_2(plan.chunks),
        COLS=_MERGED_COLUMNS,
        ACC=plan.acc,
        num_warps=8,  # each thread holds all of its chunks in registers
    )
    return mean, variance


def backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    negative_slope: float | None,
    over_batch: bool,
    groups: int,
    are_given: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward`.

    Shape:
        grad, x (N, C, *spatial) -> gradients: of x, channels-last; of weight, bias (C,), fp32 or 64.
    Args:
        groups: as in `forward`.
        are_given: mean and variance do not depend on x.
    """
    x = dense(x)
    dx = torch.empty_like(x)
    plan = Plan(x, over_batch, _GRADIENT_PROGRAMS)
    partial = plan.empty(2, plan.samples, plan.chunks, plan.channels)
    shifts, scales = partial.unbind()  # per chunk: gradients of bias and weight
    inputs = (dense(grad), x, mean, variance, weight, bias)
    sizes = (plan.voxels, plan.channels)
    constants: dict[str, Any] = {"EPS": eps, "SLOPE": negative_slope, **plan.tile}
    with torch.cuda.device_of(x):
        kernels.affine_gradients[plan.chunk_grid](*inputs, shifts, scales, *sizes, plan.steps, **constants)
        shift, scale = partial.sum(2).unbind()
        through_statistics: tuple[Tensor | None, ...] = (shift, scale)
        if are_given:
            through_statistics = (None, None)
        elif groups:
            through_statistics = tuple(_weighted_mean(each, weight, groups) for each in (shift, scale))
        kernels.input_gradient[plan.tile_grid](
            *inputs, *through_statistics, dx, *sizes, GROUPED=groups > 0, TILES=plan.tiles, **constants
        )
    return dx, scale.sum(0), shift.sum(0)


def _of_groups(mean: Tensor, variance: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each group, for each of its channels. Shape: (N, C) twice -> the same."""
    means = mean.unflatten(1, (groups, -1))
    group_mean = means.mean(2, keepdim=True)
    variances = variance.unflatten(1, (groups, -1)) + (means - group_mean).square()
    group_variance = variances.mean(2, keepdim=True)
    return _for_channels(group_mean, means), _for_channels(group_variance, means)


def _weighted_mean(sums: Tensor, weight: Tensor | None, groups: int) -> Tensor:
    """The mean over each group's channels of their sums times their weights. Shape: (N, C) -> (N, C)."""
    weighted = sums if weight is None else sums * weight.to(sums.dtype)
    by_group = weighted.unflatten(1, (groups, -1))
    return _for_channels(by_group.mean(2, keepdim=True), by_group)


def _for_channels(of_group: Tensor, by_group: Tensor) -> Tensor:
    """In memory for each channel, as kernels read it. Shape: (N, groups, 1) like (N, groups, c) -> (N, C)."""
    return of_group.expand_as(by_group).flatten(1).contiguous()


def dense(x: Tensor) -> Tensor:
    """The same tensor, channels-last without gaps; copied only if necessary."""
    return x.contiguous(memory_format=CHANNELS_LAST[x.ndim])


class Plan:
    """How a tensor is split: `steps` tiles form a chunk; there are enough chunks in all to fill the GPU.

    Args:
        over_batch: the batch is one sample: its voxels lie one after another in memory.
        programs: for each multiprocessor at most so many chunks, over samples and blocks of channels.
    """

    def __init__(self, x: Tensor, over_batch: bool, programs: int = _MOMENT_PROGRAMS) -> None:
        self.channels = x.shape[1]
        self.samples = 1 if over_batch else len(x)
        self.voxels = x.numel() // (self.samples * self.channels)  # that share their statistics
        columns = min(triton.next_power_of_2(self.channels), _MAX_COLUMNS)
        self.rows = _TILE // columns
        column_blocks = triton.cdiv(self.channels, columns)
        target_chunks = programs * multiprocessors(x.device) // (self.samples * column_blocks)
        longest_chunks = self.voxels // (_MIN_STEPS * self.rows)
        chunks = max(1, min(_MAX_CHUNKS, target_chunks, longest_chunks))
        self.steps = triton.cdiv(triton.cdiv(self.voxels, chunks), self.rows)
        self.chunks = triton.cdiv(self.voxels, self.steps * self.rows)  # none is empty
        # program ids: 0 chunk or tile of voxels, 1 block of channels, 2 sample
        self.chunk_grid = (self.chunks, column_blocks, self.samples)
        tiles = triton.cdiv(self.voxels, self.rows)
        fills = tiles * column_blocks * self.samples >= _TILES * _WAVES * multiprocessors(x.device)
        self.tiles = _TILES if fills else 1
        self.tile_grid = (triton.cdiv(tiles, self.tiles), column_blocks, self.samples)
        is_double = x.dtype == torch.float64
        self.acc = tl.float64 if is_double else tl.float32
        self.dtype = torch.float64 if is_double else torch.float32
        self.device = x.device
        # 16 bytes of bf16 at once if 8 divides the channels
        align = math.gcd(self.channels, 16)
        # Where an address serves one element, a thread with 16 of them would not have the registers
        warps = 4 if align >= 8 else 8
        self.tile = {"ALIGN": align, "ROWS": self.rows, "COLS": columns, "ACC": self.acc, "num_warps": warps}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; that of an A100 for Triton's interpreter."""
    if device.type != "cuda":
        return _A100_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
