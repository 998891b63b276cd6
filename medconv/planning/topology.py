"""A U-Net's stages from patch and spacing: strides, kernels and channels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod

from medconv.planning.sizes import Size

MIN_EDGE = 4  # voxels along an axis at the coarsest stage
_THICK = 3  # times the finest voxel: slices that are seldom halved, as neighbours have little in common
# Axes whose voxels differ by less than this factor are halved together, and get kernels of 3 together.
EVEN = 2
_PATCH_EDGE = {2: 2048, 3: 256}  # the largest patch holds as many voxels as a square or cube of this edge

Steps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Network:
    """The stages of a U-Net, finest first.

    Args:
        strides: per step between stages, one number per axis.
        encoder_convs: per stage; None: two. decoder_convs: of each stage.
        divisible_by: what the network divides each axis of the patch by, beside the strides.
    """

    strides: Steps
    kernel_sizes: Steps
    channels: tuple[int, ...]
    encoder_convs: tuple[int, ...] | None = None
    decoder_convs: int = 2
    divisible_by: int = 1

    def divisor(self, spatial_dims: int) -> tuple[int, ...]:
        """The divisor of the patch size, per axis."""
        steps = (prod(step[axis] for step in self.strides) for axis in range(spatial_dims))
        return tuple(lcm(step, self.divisible_by) for step in steps)


def halvings(patch: Sequence[int], spacing: Sequence[float], exact: bool, max_stages: int | None) -> Steps:
    """Strides: an axis is halved while it keeps `MIN_EDGE` voxels (thick slices: while it has 3 times as
    many) and its voxels are below twice as long as the finest of those that can be halved.

    Args: exact: only even numbers are halved; else the patch is rounded up afterwards.
    Source: nnU-Net's rules but for the last; Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    size, voxel = list(patch), [float(s) for s in spacing]
    least = [MIN_EDGE * (3 if v >= _THICK * min(voxel) else 2) for v in voxel]
    steps: list[tuple[int, ...]] = []
    while max_stages is None or len(steps) < max_stages - 1:
        can = [a for a, n in enumerate(size) if n >= least[a] and not (exact and n % 2)]
        halve = [a for a in can if voxel[a] < EVEN * min(voxel[b] for b in can)]
        if not halve or (len(halve) == 1 and size[halve[0]] < 3 * MIN_EDGE):
            break
        steps.append(tuple(2 if a in halve else 1 for a in range(len(size))))
        size = [-(-n // step) for n, step in zip(size, steps[-1], strict=True)]
        voxel = [v * step for v, step in zip(voxel, steps[-1], strict=True)]
    return tuple(steps)


def kernels(spacing: Sequence[float], strides: Steps) -> Steps:
    """3 along every axis; but before the last stage 1 across slices twice as thick as the finest axis."""
    voxel, kernel, sizes = [float(s) for s in spacing], [1] * len(spacing), []
    for step in ((1,) * len(voxel), *strides):
        voxel = [v * s for v, s in zip(voxel, step, strict=True)]
        kernel = [3 if k == 3 or v < EVEN * min(voxel) else 1 for k, v in zip(kernel, voxel, strict=True)]
        sizes.append(tuple(kernel))
    return (*sizes[:-1], (3,) * len(voxel))


def widths(num_stages: int, spatial_dims: int, size: Size) -> tuple[int, ...]:
    """Channels: twice as many in each stage, up to the size's limit."""
    return tuple(min(size.base_channels * 2**i, size.max_channels[spatial_dims]) for i in range(num_stages))


def rounded_up(patch: Sequence[int], divisor: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // d) * d for n, d in zip(patch, divisor, strict=True))


def largest_patch(median: Sequence[int], spacing: Sequence[float]) -> tuple[int, ...]:
    """The median image, or what a cube in mm of a generous volume holds of it."""
    per_mm = [1 / s for s in spacing]
    scale = (_PATCH_EDGE[len(per_mm)] ** len(per_mm) / prod(per_mm)) ** (1 / len(per_mm))
    return tuple(max(MIN_EDGE, min(round(scale * n), most)) for n, most in zip(per_mm, median, strict=True))


def need_strides(strides: Sequence[Sequence[int]], spatial_dims: int) -> Steps:
    """Raises: ValueError: not one whole number from 1 per step and axis."""
    steps = _per_axis(strides, spatial_dims)
    if steps is None or any(n < 1 for step in steps for n in step):
        what = f"{spatial_dims} whole numbers of 1 or more for each step between stages"
        raise ValueError(f"plan.strides needs {what}, got {strides}")
    return steps


def need_kernels(kernel_sizes: Sequence[Sequence[int]], num_stages: int, spatial_dims: int) -> Steps:
    """Raises: ValueError: not one odd number per stage and axis."""
    sizes = _per_axis(kernel_sizes, spatial_dims)
    if sizes is None or len(sizes) != num_stages or any(n < 1 or n % 2 == 0 for k in sizes for n in k):
        what = f"{spatial_dims} odd numbers for each of {num_stages} stages"
        raise ValueError(f"plan.kernel_sizes needs {what}, got {kernel_sizes}")
    return sizes


def need_channels(channels: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Raises: ValueError: not one positive number per stage."""
    if len(channels) != num_stages or any(n < 1 for n in channels):
        what = f"one number of 1 or more for each of {num_stages} stages"
        raise ValueError(f"plan.channels needs {what}, got {list(channels)}")
    return tuple(channels)


def encoder_convs(residual_blocks: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Convolutions per stage of residual blocks, which have two; the first stage has another before them.

    Raises: ValueError: not a positive number of blocks for each stage; further ones are not used.
    """
    blocks = residual_blocks[:num_stages]
    if len(blocks) < num_stages or any(n < 1 for n in blocks):
        what = f"a number of 1 or more for each of {num_stages} stages"
        raise ValueError(f"model.residual_blocks needs {what}, got {list(residual_blocks)}")
    return tuple(2 * n + (stage == 0) for stage, n in enumerate(blocks))


def _per_axis(rows: object, spatial_dims: int) -> Steps | None:
    """Rows of one whole number per axis, a single number standing for all; None for anything else."""
    if not isinstance(rows, (list, tuple)):
        return None
    full = [(row,) * spatial_dims if isinstance(row, int) else row for row in rows]
    if not all(isinstance(row, (list, tuple)) and len(row) == spatial_dims for row in full):
        return None
    return tuple(map(tuple, full)) if all(type(n) is int for row in full for n in row) else None


def coarsest(patch: Sequence[int], strides: Steps) -> tuple[int, ...]:
    """Voxels left at the coarsest stage."""
    return tuple(n // prod(step[axis] for step in strides) for axis, n in enumerate(patch))


def num_weights(network: Network, num_channels: int, num_classes: int) -> int:
    """Of our U-Net; norms and biases are not counted."""
    taps, wide = [prod(kernel) for kernel in network.kernel_sizes], network.channels
    first, convs = [num_channels, *wide[1:]], network.encoder_convs or (2,) * len(wide)
    encoder = sum(
        k * c * (into + (n - 1) * c) for k, c, into, n in zip(taps, wide, first, convs, strict=True)
    )
    decoder = sum(k * c * (network.decoder_convs + 1) * c for k, c in zip(taps[:-1], wide[:-1], strict=True))
    joins = sum(2 * prod(step) * a * b for step, (a, b) in zip(network.strides, pairwise(wide), strict=True))
    return encoder + decoder + joins + wide[0] * num_classes
