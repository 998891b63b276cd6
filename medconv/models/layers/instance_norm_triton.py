"""Triton kernels of the channels-last instance norm and their launchers; imported only where Triton runs.

All kernels treat a dense channels-last tensor as (samples, voxels, channels), channels innermost, split into
tiles of rows (voxels) by columns (channels). Reductions have two stages: every chunk of voxels gives a
partial result, then the partial results are merged.

Source: Welford 1962, doi:10.1080/00401706.1962.10490022, for the moments of a lane; Chan, Golub and LeVeque
1979 (Stanford STAN-CS-79-773) for merging them. Both keep their digits where the mean is far from 0.
"""

# Triton reads the annotations of kernels. mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from medconv.convs.parametrization import CHANNELS_LAST

_TILE = 2048  # elements: 16 per thread
_MAX_COLUMNS = 64  # 128 bytes of bf16
_PROGRAMS = 1024  # about eight for each multiprocessor of a large GPU
_MAX_CHUNKS = 512  # that one program merges
_MIN_STEPS = 4  # tiles of a chunk, so that its partial result is small beside what it reads
_MERGED_COLUMNS = 8  # channels of a program that merges


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    negative_slope: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, scale, shift and activate.

    Shape:
        x (N, C, *spatial) -> the same, channels-last; mean and 1 / standard deviation, each (N, C).
    """
    x = dense(x)
    plan = _Plan(x)
    y = torch.empty_like(x)
    # per chunk: mean, and sum of squared deviations from it
    means, squares = plan.empty(2, plan.samples, plan.chunks, plan.channels).unbind()
    mean = plan.empty(plan.samples, plan.channels)
    rstd = plan.empty(plan.samples, plan.channels)
    merge_grid = (triton.cdiv(plan.channels, _MERGED_COLUMNS), plan.samples)
    with torch.cuda.device_of(x):
        _moments[plan.chunk_grid](x, means, squares, plan.voxels, plan.channels, plan.steps, **plan.tile)
        _merge[merge_grid](
            means,
            squares,
            mean,
            rstd,
            plan.voxels,
            plan.channels,
            plan.chunks,
            plan.steps * plan.rows,  # voxels of a chunk; the last may have fewer
            EPS=eps,
            CHUNKS=triton.next_power_of_2(plan.chunks),
            COLS=_MERGED_COLUMNS,
            ACC=plan.acc,
        )
        _normalise[plan.tile_grid](
            x, mean, rstd, weight, bias, y, plan.voxels, plan.channels, SLOPE=negative_slope, **plan.tile
        )
    return y, mean, rstd


def backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    negative_slope: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward`.

    Shape:
        grad, x (N, C, *spatial) -> gradients: of x, channels-last; of weight, bias (C,), fp32 or 64.
    """
    x = dense(x)
    grad = dense(grad)
    plan = _Plan(x)
    dx = torch.empty_like(x)
    partial = plan.empty(2, plan.samples, plan.chunks, plan.channels)
    shifts, scales = partial.unbind()  # per chunk: gradients of bias and weight
    inputs = (grad, x, mean, rstd, weight, bias)
    constants = {"SLOPE": negative_slope, **plan.tile}
    with torch.cuda.device_of(x):
        _slopes[plan.chunk_grid](*inputs, shifts, scales, plan.voxels, plan.channels, plan.steps, **constants)
        shift, scale = partial.sum(2).unbind()
        _input_gradient[plan.tile_grid](*inputs, shift, scale, dx, plan.voxels, plan.channels, **constants)
    return dx, scale.sum(0), shift.sum(0)


def dense(x: Tensor) -> Tensor:
    """The same tensor, channels-last without gaps; copied only if necessary."""
    return x.contiguous(memory_format=CHANNELS_LAST[x.ndim])


class _Plan:
    """How a tensor is split: `steps` tiles form a chunk; there are enough chunks in all to fill the GPU."""

    def __init__(self, x: Tensor) -> None:
        self.samples, self.channels = x.shape[:2]
        self.voxels = x[0, 0].numel()
        columns = min(triton.next_power_of_2(self.channels), _MAX_COLUMNS)
        self.rows = _TILE // columns
        column_blocks = triton.cdiv(self.channels, columns)
        target_chunks = _PROGRAMS // (self.samples * column_blocks)
        longest_chunks = self.voxels // (_MIN_STEPS * self.rows)
        chunks = max(1, min(_MAX_CHUNKS, target_chunks, longest_chunks))
        self.steps = triton.cdiv(triton.cdiv(self.voxels, chunks), self.rows)
        self.chunks = triton.cdiv(self.voxels, self.steps * self.rows)  # none is empty
        # program ids: 0 chunk or tile of voxels, 1 block of channels, 2 sample
        self.chunk_grid = (self.chunks, column_blocks, self.samples)
        self.tile_grid = (triton.cdiv(self.voxels, self.rows), column_blocks, self.samples)
        is_double = x.dtype == torch.float64
        self.acc = tl.float64 if is_double else tl.float32
        self.dtype = torch.float64 if is_double else torch.float32
        self.device = x.device
        self.tile = {"ROWS": self.rows, "COLS": columns, "ACC": self.acc}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@triton.jit
def _tile(step, steps, voxels, channels, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets of this program's tile, 64 bits for more than 2^31 elements, and which elements exist."""
    first_tile = tl.program_id(0).to(tl.int64) * steps
    rows = (first_tile + step) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    exists = (rows < voxels)[:, None] & (columns < channels)[None, :]
    rows_before = tl.program_id(2).to(tl.int64) * voxels
    offsets = (rows_before + rows[:, None]) * channels + columns[None, :]
    return offsets, exists


@triton.jit
def _row(pointer, channels, PER_SAMPLE: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):
    """One number per channel, (1, COLS), from (C,) or from this program's sample of (N, C)."""
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    offsets = columns + tl.program_id(2) * channels * PER_SAMPLE
    return tl.load(pointer + offsets, columns < channels, 0.0).to(ACC)[None, :]


@triton.jit
def _store_partial(pointer, value, channels, COLS: tl.constexpr):
    """One number per channel into (N, chunks, C), at this program's sample and chunk."""
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    # (sample, chunk) as one index
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    tl.store(pointer + row * channels + columns, value, columns < channels)


@triton.jit
def _affine(hat, weight, bias, channels, COLS: tl.constexpr, ACC: tl.constexpr):
    if weight is not None:
        hat = hat * _row(weight, channels, 0, COLS, ACC)
    if bias is not None:
        hat = hat + _row(bias, channels, 0, COLS, ACC)
    return hat


@triton.jit
def _weighted_mean(means, counts):
    """The mean of means along the first axis, refined once: summing many large values loses digits."""
    total = tl.sum(counts, 0)
    rough = tl.sum(means * counts, 0) / total
    correction = tl.sum((means - rough[None, :]) * counts, 0) / total
    return rough + correction


@triton.jit
def _moments(
    x,
    means,
    squares,
    voxels,
    channels,
    steps,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Mean and sum of squared deviations of a chunk: Welford's update per lane, then Chan's merge."""
    mean = tl.zeros((ROWS, COLS), ACC)
    square = tl.zeros((ROWS, COLS), ACC)
    count = tl.zeros((1, 1), ACC)
    for step in range(steps):
        offsets, exists = _tile(step, steps, voxels, channels, ROWS, COLS)
        value = tl.load(x + offsets, exists, 0.0).to(ACC)
        # Welford's update; elements that do not exist change nothing
        count += 1.0
        delta = tl.where(exists, value - mean, 0.0)
        mean += delta * (1.0 / count)
        square += delta * (value - mean)
    # how many voxels each lane has seen: the last chunk may end early
    remaining = voxels - tl.program_id(0).to(tl.int64) * steps * ROWS
    counts = tl.minimum((remaining - tl.arange(0, ROWS) + ROWS - 1) // ROWS, steps).to(ACC)[:, None]
    merged = _weighted_mean(mean, counts)
    deviation = mean - merged[None, :]
    _store_partial(means, merged, channels, COLS)
    _store_partial(squares, tl.sum(square + counts * deviation * deviation, 0), channels, COLS)


@triton.jit
def _merge(
    means,
    squares,
    mean,
    rstd,
    voxels,
    channels,
    chunks,
    length,
    EPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Chan's merge of all chunks: mean and 1 / standard deviation."""
    chunk = tl.arange(0, CHUNKS)
    columns = tl.program_id(0) * COLS + tl.arange(0, COLS)
    offsets = (tl.program_id(1) * chunks + chunk[:, None]) * channels + columns[None, :]
    exists = (chunk < chunks)[:, None] & (columns < channels)[None, :]
    # the last chunk may end early, and CHUNKS is rounded up to a power of two
    remaining = voxels - chunk.to(tl.int64) * length
    counts = tl.maximum(tl.minimum(remaining, length), 0).to(ACC)[:, None]
    chunk_means = tl.load(means + offsets, exists, 0.0)
    merged = _weighted_mean(chunk_means, counts)
    deviation = chunk_means - merged[None, :]
    chunk_squares = tl.load(squares + offsets, exists, 0.0)
    square = tl.sum(chunk_squares + counts * deviation * deviation, 0)
    out = tl.program_id(1) * channels + columns
    tl.store(mean + out, merged, columns < channels)
    tl.store(rstd + out, 1.0 / tl.sqrt(square / voxels + EPS), columns < channels)


@triton.jit
def _normalise(
    x,
    mean,
    rstd,
    weight,
    bias,
    y,
    voxels,
    channels,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    offsets, exists = _tile(0, 1, voxels, channels, ROWS, COLS)
    value = tl.load(x + offsets, exists, 0.0).to(ACC)
    mean_row = _row(mean, channels, 1, COLS, ACC)
    rstd_row = _row(rstd, channels, 1, COLS, ACC)
    hat = (value - mean_row) * rstd_row
    out = _affine(hat, weight, bias, channels, COLS, ACC)
    if SLOPE is not None:
        out = tl.where(out > 0, out, out * SLOPE)
    tl.store(y + offsets, out.to(y.dtype.element_ty), exists)


@triton.jit
def _through_activation(
    grad,
    x,
    mean,
    rstd,
    weight,
    bias,
    offsets,
    exists,
    channels,
    SLOPE: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient before the activation, whose sign is recomputed, and the normalised value; 0 outside."""
    value = tl.load(x + offsets, exists, 0.0).to(ACC)
    slope = tl.load(grad + offsets, exists, 0.0).to(ACC)
    mean_row = _row(mean, channels, 1, COLS, ACC)
    rstd_row = _row(rstd, channels, 1, COLS, ACC)
    hat = (value - mean_row) * rstd_row
    if SLOPE is not None:
        before_activation = _affine(hat, weight, bias, channels, COLS, ACC)
        slope = tl.where(before_activation > 0, slope, slope * SLOPE)
    return slope, hat


@triton.jit
def _slopes(
    grad,
    x,
    mean,
    rstd,
    weight,
    bias,
    shifts,
    scales,
    voxels,
    channels,
    steps,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """A chunk's share of the gradients of bias and weight."""
    shift = tl.zeros((ROWS, COLS), ACC)
    scale = tl.zeros((ROWS, COLS), ACC)
    for step in range(steps):
        offsets, exists = _tile(step, steps, voxels, channels, ROWS, COLS)
        slope, hat = _through_activation(
            grad, x, mean, rstd, weight, bias, offsets, exists, channels, SLOPE, COLS, ACC
        )
        shift += slope
        scale += slope * hat
    _store_partial(shifts, tl.sum(shift, 0), channels, COLS)
    _store_partial(scales, tl.sum(scale, 0), channels, COLS)


@triton.jit
def _input_gradient(
    grad,
    x,
    mean,
    rstd,
    weight,
    bias,
    shift,
    scale,
    dx,
    voxels,
    channels,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of x, with its mean over the voxels and its component along x removed."""
    offsets, exists = _tile(0, 1, voxels, channels, ROWS, COLS)
    slope, hat = _through_activation(
        grad, x, mean, rstd, weight, bias, offsets, exists, channels, SLOPE, COLS, ACC
    )
    factor = _row(rstd, channels, 1, COLS, ACC)
    if weight is not None:
        factor = factor * _row(weight, channels, 0, COLS, ACC)
    # sums over the voxels: shift of the gradient, scale of the gradient times the normalised value
    mean_slope = _row(shift, channels, 1, COLS, ACC) / voxels
    along = hat * (_row(scale, channels, 1, COLS, ACC) / voxels)
    out = factor * (slope - mean_slope - along)
    tl.store(dx + offsets, out.to(dx.dtype.element_ty), exists)
