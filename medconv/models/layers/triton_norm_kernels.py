"""Triton kernels of the channels-last norms; imported only where Triton runs.

All kernels treat a dense channels-last tensor as (samples, voxels, channels), channels innermost, split into
tiles of rows (voxels) by columns (channels). Instance norm has statistics per sample; for batch norm, the
batch is one long sample. Reductions have two stages: every chunk of voxels gives a partial result, then the
partial results are merged. Group norm has the statistics of its channels, merged by torch.

Source: Welford 1962, doi:10.1080/00401706.1962.10490022, for the moments of a lane; Chan, Golub and LeVeque
1979 (Stanford STAN-CS-79-773) for merging them. Both keep their digits where the mean is far from 0.
"""

# Triton reads the annotations of kernels. mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def _aligned(channels, ALIGN: tl.constexpr):
    """The same number; the compiler sees that ALIGN divides it, so that loads may be wide."""
    return channels // ALIGN * ALIGN


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
def _rstd(variance, channels, EPS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):
    """1 / standard deviation, (1, COLS)."""
    return 1.0 / tl.sqrt(_row(variance, channels, 1, COLS, ACC) + EPS)


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
def moments(
    x,
    means,
    squares,
    voxels,
    channels,
    steps,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Mean and sum of squared deviations of a chunk: Welford's update per lane, then Chan's merge."""
    channels = _aligned(channels, ALIGN)
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
def merge(
    means,
    squares,
    mean,
    variance,
    voxels,
    channels,
    chunks,
    length,
    CHUNKS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Chan's merge of all chunks: mean and variance (biased). `length`: voxels of a chunk."""
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
    tl.store(variance + out, square / voxels, columns < channels)


@triton.jit
def normalise(
    x,
    mean,
    variance,
    weight,
    bias,
    y,
    voxels,
    channels,
    EPS: tl.constexpr,
    SLOPE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Normalise, scale, shift and activate."""
    channels = _aligned(channels, ALIGN)
    offsets, exists = _tile(0, 1, voxels, channels, ROWS, COLS)
    value = tl.load(x + offsets, exists, 0.0).to(ACC)
    hat = (value - _row(mean, channels, 1, COLS, ACC)) * _rstd(variance, channels, EPS, COLS, ACC)
    out = _affine(hat, weight, bias, channels, COLS, ACC)
    if SLOPE is not None:
        out = tl.where(out > 0, out, out * SLOPE)
    tl.store(y + offsets, out.to(y.dtype.element_ty), exists)


@triton.jit
def _through_activation(
    grad,
    x,
    mean,
    variance,
    weight,
    bias,
    offsets,
    exists,
    channels,
    EPS: tl.constexpr,
    SLOPE: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient before the activation, whose sign is recomputed, and the normalised value; 0 outside."""
    value = tl.load(x + offsets, exists, 0.0).to(ACC)
    slope = tl.load(grad + offsets, exists, 0.0).to(ACC)
    hat = (value - _row(mean, channels, 1, COLS, ACC)) * _rstd(variance, channels, EPS, COLS, ACC)
    if SLOPE is not None:
        before_activation = _affine(hat, weight, bias, channels, COLS, ACC)
        slope = tl.where(before_activation > 0, slope, slope * SLOPE)
    return slope, hat


@triton.jit
def affine_gradients(
    grad,
    x,
    mean,
    variance,
    weight,
    bias,
    shifts,
    scales,
    voxels,
    channels,
    steps,
    EPS: tl.constexpr,
    SLOPE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """A chunk's share of the gradients of bias (`shifts`) and weight (`scales`)."""
    channels = _aligned(channels, ALIGN)
    shift = tl.zeros((ROWS, COLS), ACC)
    scale = tl.zeros((ROWS, COLS), ACC)
    for step in range(steps):
        offsets, exists = _tile(step, steps, voxels, channels, ROWS, COLS)
        slope, hat = _through_activation(
            grad, x, mean, variance, weight, bias, offsets, exists, channels, EPS, SLOPE, COLS, ACC
        )
        shift += slope
        scale += slope * hat
    _store_partial(shifts, tl.sum(shift, 0), channels, COLS)
    _store_partial(scales, tl.sum(scale, 0), channels, COLS)


@triton.jit
def input_gradient(
    grad,
    x,
    mean,
    variance,
    weight,
    bias,
    shift,
    scale,
    dx,
    voxels,
    channels,
    GROUPED: tl.constexpr,
    EPS: tl.constexpr,
    SLOPE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of x.

    If x decides the statistics, the mean over the voxels and the component along x are removed: `shift` is
    the sum of the gradient, `scale` that of the gradient times the normalised value. Else both are None. With
    `GROUPED` they are means over the channels of a group, of sums that are multiplied by the weight.
    """
    channels = _aligned(channels, ALIGN)
    offsets, exists = _tile(0, 1, voxels, channels, ROWS, COLS)
    slope, hat = _through_activation(
        grad, x, mean, variance, weight, bias, offsets, exists, channels, EPS, SLOPE, COLS, ACC
    )
    factor = _rstd(variance, channels, EPS, COLS, ACC)
    if weight is not None:
        if GROUPED:
            slope = slope * _row(weight, channels, 0, COLS, ACC)
        else:
            factor = factor * _row(weight, channels, 0, COLS, ACC)
    if shift is not None:
        along = hat * (_row(scale, channels, 1, COLS, ACC) / voxels)
        slope = slope - _row(shift, channels, 1, COLS, ACC) / voxels - along
    tl.store(dx + offsets, (factor * slope).to(dx.dtype.element_ty), exists)
