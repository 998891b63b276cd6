"""Triton kernels of the channels-last norms; imported only where Triton runs.

All kernels treat a dense channels-last tensor as (samples, voxels, channels), channels innermost, split into
tiles of rows (voxels) by columns (channels). Instance norm has statistics per sample; for batch norm, the
batch is one long sample. Reductions have two stages: every chunk of voxels gives a partial result, then the
partial results are merged. Group norm has the statistics of its channels, merged by torch.

Few instructions for each element leave the memory's bandwidth as the limit. So the numbers of a channel are
combined once for all tiles of a program, and loops load the next tiles ahead. `experiments/gpu.md` has the
counts; what they change on a GPU is not measured yet (`norm-price` of `scripts/gpu_check.py`).

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
    """Where this program's tile begins, the offsets within it, and which of its elements exist.

    The beginning has 64 bits, for more than 2^31 elements, and is one number; the offsets, which are the same
    in every step and for every tensor, have 32.
    """
    first_row = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    begin = (tl.program_id(2).to(tl.int64) * voxels + first_row) * channels
    remaining = tl.minimum(voxels - first_row, ROWS).to(tl.int32)
    exists = (rows < remaining)[:, None] & (columns < channels)[None, :]
    return begin, rows[:, None] * channels + columns[None, :], exists


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
def _scale(variance, weight, channels, EPS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):
    """What a deviation from the mean is multiplied by, (1, COLS)."""
    scale = _rstd(variance, channels, EPS, COLS, ACC)
    if weight is not None:
        scale = scale * _row(weight, channels, 0, COLS, ACC)
    return scale


@triton.jit
def _affine(scaled, bias, channels, COLS: tl.constexpr, ACC: tl.constexpr):
    if bias is not None:
        scaled = scaled + _row(bias, channels, 0, COLS, ACC)
    return scaled


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
    """Mean and sum of squared deviations of a chunk.

    Half precision: sums of distances from the first tile's mean, which is near enough for values of 11 bits
    or fewer, in half of the instructions of Welford's update, which the others take.
    """
    channels = _aligned(channels, ALIGN)
    mean = tl.zeros((ROWS, COLS), ACC)
    square = tl.zeros((ROWS, COLS), ACC)
    # how many voxels each lane sees: the last chunk may end early
    remaining = voxels - tl.program_id(0).to(tl.int64) * steps * ROWS
    counts = tl.minimum((remaining - tl.arange(0, ROWS) + ROWS - 1) // ROWS, steps).to(ACC)[:, None]
    if x.dtype.element_ty.primitive_bitwidth == 16:
        begin, offsets, exists = _tile(0, steps, voxels, channels, ROWS, COLS)
        in_first = tl.minimum(remaining, ROWS).to(ACC)
        near = (tl.sum(tl.load(x + begin + offsets, exists, 0.0).to(ACC), 0) / in_first)[None, :]
        columns = (tl.program_id(1) * COLS + tl.arange(0, COLS) < channels)[None, :]
        whole = tl.minimum(remaining // ROWS, steps).to(tl.int32)  # tiles in which all rows exist
        for step in tl.range(whole, num_stages=3):
            begin, offsets, exists = _tile(step, steps, voxels, channels, ROWS, COLS)
            distance = tl.load(x + begin + offsets, columns, 0.0).to(ACC) - near
            mean += distance
            square += distance * distance
        if whole < steps:
            begin, offsets, exists = _tile(whole, steps, voxels, channels, ROWS, COLS)
            distance = tl.where(exists, tl.load(x + begin + offsets, exists, 0.0).to(ACC) - near, 0.0)
            mean += distance
            square += distance * distance
        total = tl.sum(counts, 0)
        from_near = tl.sum(mean, 0) / total
        _store_partial(means, tl.sum(near, 0) + from_near, channels, COLS)
        _store_partial(squares, tl.sum(square, 0) - total * from_near * from_near, channels, COLS)
    else:
        count = tl.zeros((1, 1), ACC)
        for step in range(steps):
            begin, offsets, exists = _tile(step, steps, voxels, channels, ROWS, COLS)
            value = tl.load(x + begin + offsets, exists, 0.0).to(ACC)
            # Welford's update; elements that do not exist change nothing
            count += 1.0
            delta = tl.where(exists, value - mean, 0.0)
            mean += delta * (1.0 / count)
            square += delta * (value - mean)
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
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Normalise, scale, shift and activate TILES tiles."""
    channels = _aligned(channels, ALIGN)
    centre = _row(mean, channels, 1, COLS, ACC)
    scale = _scale(variance, weight, channels, EPS, COLS, ACC)
    for tile in tl.range(TILES, num_stages=3):
        begin, offsets, exists = _tile(tile, TILES, voxels, channels, ROWS, COLS)
        value = tl.load(x + begin + offsets, exists, 0.0).to(ACC)
        # not value * scale + shift: that loses digits where the mean is far from 0
        out = _affine((value - centre) * scale, bias, channels, COLS, ACC)
        if SLOPE is not None:
            out = tl.where(out > 0, out, out * SLOPE)
        tl.store(y + begin + offsets, out.to(y.dtype.element_ty), exists)


@triton.jit
def _through_activation(
    grad,
    x,
    centre,
    scale,
    bias,
    step,
    steps,
    voxels,
    channels,
    SLOPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient before the activation, whose sign is recomputed, 0 outside; and x less its mean."""
    begin, offsets, exists = _tile(step, steps, voxels, channels, ROWS, COLS)
    deviation = tl.load(x + begin + offsets, exists, 0.0).to(ACC) - centre
    slope = tl.load(grad + begin + offsets, exists, 0.0).to(ACC)
    if SLOPE is not None:
        before_activation = _affine(deviation * scale, bias, channels, COLS, ACC)
        slope = tl.where(before_activation > 0, slope, slope * SLOPE)
    return slope, deviation


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
    centre = _row(mean, channels, 1, COLS, ACC)
    factor = _scale(variance, weight, channels, EPS, COLS, ACC)
    shift = tl.zeros((ROWS, COLS), ACC)
    scale = tl.zeros((ROWS, COLS), ACC)
    for step in range(steps):
        slope, deviation = _through_activation(
            grad, x, centre, factor, bias, step, steps, voxels, channels, SLOPE, ROWS, COLS, ACC
        )
        shift += slope
        scale += slope * deviation
    rstd = tl.sum(_rstd(variance, channels, EPS, COLS, ACC), 0)
    _store_partial(shifts, tl.sum(shift, 0), channels, COLS)
    _store_partial(scales, tl.sum(scale, 0) * rstd, channels, COLS)


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
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of x, of TILES tiles.

    If x decides the statistics, the mean over the voxels and the component along x are removed: `shift` is
    the sum of the gradient, `scale` that of the gradient times the normalised value. Else both are None. With
    `GROUPED` they are means over the channels of a group, of sums that are multiplied by the weight.
    """
    channels = _aligned(channels, ALIGN)
    centre = _row(mean, channels, 1, COLS, ACC)
    rstd = _rstd(variance, channels, EPS, COLS, ACC)
    factor = _scale(variance, weight, channels, EPS, COLS, ACC)
    if shift is not None:
        # of the gradient of a normalised value (grouped), or of an output, whose weight is in `factor`
        common = rstd if GROUPED else factor
        removed = common * _row(shift, channels, 1, COLS, ACC) / voxels
        along = common * rstd * _row(scale, channels, 1, COLS, ACC) / voxels
    for tile in tl.range(TILES, num_stages=3):
        slope, deviation = _through_activation(
            grad, x, centre, factor, bias, tile, TILES, voxels, channels, SLOPE, ROWS, COLS, ACC
        )
        out = factor * slope
        if shift is not None:
            out = out - removed - along * deviation
        begin, offsets, exists = _tile(tile, TILES, voxels, channels, ROWS, COLS)
        tl.store(dx + begin + offsets, out.to(dx.dtype.element_ty), exists)
