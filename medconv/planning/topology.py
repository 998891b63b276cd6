"""A U-Net's stages from patch and spacing: strides, kernels and channels; and the memory of its step. And the
stem of MONAI's classifiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod
from typing import Any

from medconv.planning.limits import Size
from medconv.utils.errors import ArgumentError

MIN_EDGE = 4  # voxels along an axis at the coarsest stage
_THICK = 3  # times the finest voxel: slices that are seldom halved, as neighbours have little in common
# Axes whose voxels differ by less than this factor are halved together, and get kernels of 3 together.
EVEN = 2
# Arguments whose list has a number per stage, so that it sets how many there are
PER_STAGE = ("channels", "kernel_sizes", "residual_blocks", "convs_per_stage")
_STEM_VOXELS = 4096  # after the stem of a classifier, about: 64 x 64 or 16 x 16 x 16
_PATCH_EDGE = {2: 2048, 3: 256}  # the largest patch holds as many voxels as a square or cube of this edge

Steps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Network:
    """The stages of a U-Net, finest first.

    Args:
        strides: per step between stages, one number per axis.
        kernel_sizes: per stage, one number per axis.
        channels: per stage.
        encoder_convs, decoder_convs: convolutions per stage; None: two in each.
        divisible_by: what the network divides each axis of the patch by, beside the strides.
    """

    strides: Steps
    kernel_sizes: Steps
    channels: tuple[int, ...]
    encoder_convs: tuple[int, ...] | None = None
    decoder_convs: tuple[int, ...] | None = None
    divisible_by: int = 1

    def divisor(self) -> tuple[int, ...]:
        """The divisor of the patch size, per axis."""
        axes = range(len(self.kernel_sizes[0]))
        return tuple(lcm(prod(step[axis] for step in self.strides), self.divisible_by) for axis in axes)


def halvings(patch: Sequence[int], spacing: Sequence[float], exact: bool, max_stages: int | None) -> Steps:
    """Strides: an axis is halved while it keeps `MIN_EDGE` voxels (thick slices: while it has 3 times as
    many) and its voxels are below twice as long as the finest of those that can be halved.

    Args:
        exact: only even numbers are halved; else the patch is rounded up afterwards.
        max_stages: of the network; None: no limit.
    Source: nnU-Net's rules but for the last; Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    edges = list(patch)
    voxel_mm = [float(mm) for mm in spacing]
    thick_mm = _THICK * min(voxel_mm)
    min_edges = [MIN_EDGE * (3 if mm >= thick_mm else 2) for mm in voxel_mm]
    strides: list[tuple[int, ...]] = []
    while max_stages is None or len(strides) < max_stages - 1:
        axes = [axis for axis, edge in enumerate(edges) if edge >= min_edges[axis]]
        if exact:
            axes = [axis for axis in axes if edges[axis] % 2 == 0]
        finest_mm = min((voxel_mm[axis] for axis in axes), default=0.0)
        halved_axes = [axis for axis in axes if voxel_mm[axis] < EVEN * finest_mm]
        if not halved_axes:
            break
        # an axis that is halved alone must be longer than one that is halved with others
        if len(halved_axes) == 1 and edges[halved_axes[0]] < 3 * MIN_EDGE:
            break
        step = tuple(2 if axis in halved_axes else 1 for axis in range(len(edges)))
        strides.append(step)
        # rounded up, as the patch will be
        edges = [-(-edge // stride) for edge, stride in zip(edges, step, strict=True)]
        voxel_mm = [mm * stride for mm, stride in zip(voxel_mm, step, strict=True)]
    return tuple(strides)


def kernels(spacing: Sequence[float], strides: Steps) -> Steps:
    """3 along every axis; but before the last stage 1 across slices twice as thick as the finest axis."""
    num_axes = len(spacing)
    voxel_mm = [float(mm) for mm in spacing]
    kernel = (1,) * num_axes
    kernel_sizes: list[tuple[int, ...]] = []
    for step in ((1,) * num_axes, *strides):
        voxel_mm = [mm * stride for mm, stride in zip(voxel_mm, step, strict=True)]
        even_mm = EVEN * min(voxel_mm)
        # an axis that has 3 in the finer stage keeps them
        axes = zip(kernel, voxel_mm, strict=True)
        kernel = tuple(3 if finer == 3 or mm < even_mm else 1 for finer, mm in axes)
        kernel_sizes.append(kernel)
    # the last stage is 3 along every axis, however thick the slices still are
    kernel_sizes[-1] = (3,) * num_axes
    return tuple(kernel_sizes)


def widths(num_stages: int, spatial_dims: int, size: Size) -> tuple[int, ...]:
    """Channels: twice as many in each stage, up to the size's limit."""
    max_channels = size.max_channels[spatial_dims]
    return tuple(min(size.base_channels * 2**stage, max_channels) for stage in range(num_stages))


def rounded_up(patch: Sequence[int], divisor: Sequence[int]) -> tuple[int, ...]:
    """The patch size, in voxels per axis, rounded up to a multiple of the divisor."""
    axes = zip(patch, divisor, strict=True)
    return tuple(-(-edge // multiple) * multiple for edge, multiple in axes)


def largest_patch(median: Sequence[int], spacing: Sequence[float]) -> tuple[int, ...]:
    """The median image, or what a cube in mm of a generous volume holds of it."""
    dims = len(spacing)
    voxels_per_mm = [1 / mm for mm in spacing]
    max_voxels = _PATCH_EDGE[dims] ** dims
    cube_mm = (max_voxels / prod(voxels_per_mm)) ** (1 / dims)
    edges = []
    for density, median_edge in zip(voxels_per_mm, median, strict=True):
        edge = min(round(cube_mm * density), median_edge)
        edges.append(max(MIN_EDGE, edge))
    return tuple(edges)


def need_strides(strides: Sequence[Sequence[int]], spatial_dims: int) -> Steps:
    """The strides of a config, as tuples; one number stands for all axes.

    Raises:
        ValueError: not one whole number from 1 per step and axis.
    """
    steps = _per_axis(strides, spatial_dims)
    if steps is None or any(min(step) < 1 for step in steps):
        needed = f"{spatial_dims} whole numbers of 1 or more for each step between stages"
        raise ArgumentError("strides", f" needs {needed}, got {strides}")
    return steps


def need_kernels(kernel_sizes: Sequence[Sequence[int]], num_stages: int, spatial_dims: int) -> Steps:
    """The kernel sizes of a config, as tuples; one number stands for all axes.

    Raises:
        ValueError: not one odd number per stage and axis.
    """
    sizes = _per_axis(kernel_sizes, spatial_dims)
    if (
        sizes is None
        or len(sizes) != num_stages
        or any(edge < 1 or edge % 2 != 1 for kernel in sizes for edge in kernel)
    ):
        needed = f"{spatial_dims} odd numbers for each of {num_stages} stages"
        raise ArgumentError("kernel_sizes", f" needs {needed}, got {kernel_sizes}")
    return sizes


def need_channels(channels: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The channels of a config, as a tuple.

    Raises:
        ValueError: not one positive number per stage.
    """
    if len(channels) != num_stages or any(n < 1 for n in channels):
        needed = f"one number of 1 or more for each of {num_stages} stages"
        raise ArgumentError("channels", f" needs {needed}, got {list(channels)}")
    return tuple(channels)


def need_convs(convs_per_stage: int | Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The convolutions of each stage. Raises: ValueError: not a positive number, or one per stage."""
    is_number = isinstance(convs_per_stage, int)
    convs = [convs_per_stage] * num_stages if isinstance(convs_per_stage, int) else convs_per_stage
    if len(convs) != num_stages or any(n < 1 for n in convs):
        needed = "1 or more" if is_number else f"one number of 1 or more for each of {num_stages} stages"
        raise ArgumentError("convs_per_stage", f" needs {needed}, got {convs_per_stage}")
    return tuple(convs)


def encoder_convs(residual_blocks: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Convolutions per stage of residual blocks, which have two; the first stage has another before them.

    Raises:
        ValueError: not a positive number of blocks for each stage; further ones are not used.
    """
    blocks = residual_blocks[:num_stages]
    if len(blocks) < num_stages or any(n < 1 for n in blocks):
        needed = f"a number of 1 or more for each of {num_stages} stages"
        raise ArgumentError("residual_blocks", f" needs {needed}, got {list(residual_blocks)}")
    convs = [2 * num_blocks for num_blocks in blocks]
    convs[0] += 1  # the convolution before the first block
    return tuple(convs)


def _per_axis(rows: object, spatial_dims: int) -> Steps | None:
    """Rows of one whole number per axis, a single number standing for all; None for anything else."""
    if not isinstance(rows, (list, tuple)):
        return None
    full_rows = []
    for row in rows:
        full_row = (row,) * spatial_dims if isinstance(row, int) else row
        if not isinstance(full_row, (list, tuple)) or len(full_row) != spatial_dims:
            return None
        # not isinstance: True is an int, too
        if not all(type(number) is int for number in full_row):
            return None
        full_rows.append(tuple(full_row))
    return tuple(full_rows)


def num_weights(network: Network, num_channels: int, num_classes: int) -> int:
    """The number of weights of our U-Net; norms and biases are not counted.

    Args:
        num_channels: of the image.
        num_classes: outputs per voxel.
    """
    channels = network.channels
    num_stages = len(channels)
    kernel_voxels = [prod(kernel) for kernel in network.kernel_sizes]
    input_channels = [num_channels, *channels[1:]]
    stage_convs = network.encoder_convs or (2,) * num_stages
    decoder_convs = network.decoder_convs or (2,) * num_stages
    weights = 0
    for stage in range(num_stages):
        # the first convolution of a stage reads its input, the others its own channels
        read_channels = input_channels[stage] + (stage_convs[stage] - 1) * channels[stage]
        weights += kernel_voxels[stage] * channels[stage] * read_channels
    for stage in range(num_stages - 1):
        # the first convolution of a decoder stage reads the concatenation, twice its channels
        read_channels = (decoder_convs[stage] + 1) * channels[stage]
        weights += kernel_voxels[stage] * channels[stage] * read_channels
    for step, (finer, coarser) in zip(network.strides, pairwise(channels), strict=True):
        # down in the encoder and up in the decoder
        weights += 2 * prod(step) * finer * coarser
    return weights + channels[0] * num_classes


# The memory of a training step


def stem_for(patch_size: Sequence[int]) -> dict[str, Any]:
    """The stem of a classifier for images of this size: downsample only as far as needed for 4096 voxels.

    The usual stem, a 7-kernel with stride 2 and a pooling with stride 2, leaves 7 x 7 of 28 x 28.

    Returns:
        kernel_size and stride of the first convolution; no_pool: without the pooling after it.
    """
    # The first convolution halves each axis, then the pooling.
    needs_stride = prod(size / 2 for size in patch_size) > _STEM_VOXELS
    needs_pool = prod(patch_size) > _STEM_VOXELS
    return {
        "kernel_size": 7 if needs_stride else 3,
        "stride": 2 if needs_stride else 1,
        "no_pool": not (needs_stride or needs_pool),
    }


GB = 2**30
_WEIGHT_BYTES = 16  # fp32 weights, gradients, and AdamW's two moments
# Per voxel and class: the softmax, its gradient and a temporary in fp32; beside them the logits in half
# precision, if they are.
_LOSS_BYTES = 12
# Of the activations at their peak, as measured (docs/planning.md).
_KEPT_SHARE = {"none": 1.0, "pointwise": 0.75, "blocks": 0.7}


@dataclass(frozen=True)
class Budget:
    """What a training step may cost: the memory of one device, and a size for the time there is.

    Args:
        memory_gb: GiB.
        origin: where `memory_gb` comes from, in words.
        precision: Lightning's.
        activation_checkpointing: none, blocks or pointwise.
        size: of `limits.SIZES`.
        size_origin: why this size, in words.
    """

    memory_gb: float = 8.0
    origin: str = "memory_gb"
    precision: str = "32-true"
    activation_checkpointing: str = "none"
    size: str = "full"
    size_origin: str = "no limit of time"


def step_bytes(
    network: Network,
    patch: Sequence[int],
    batch_size: int,
    num_channels: int,
    num_classes: int,
    budget: Budget,
) -> float:
    """Peak memory of a step: weights, optimizer state, and activations at the start of the backward pass.

    A convolution with norm and activation keeps two tensors: an encoder stage that for each of its own, and
    its downsampled input, a decoder stage for each and the concatenation. Then the loss and the first
    gradients, without the workspace of the convolutions. Error against measured steps: docs/planning.md.
    """
    value_bytes = 2 if "16" in budget.precision else 8 if "64" in budget.precision else 4  # of an activation
    channels = network.channels
    num_stages = len(channels)
    stage_convs = network.encoder_convs or (2,) * num_stages
    decoder_convs = network.decoder_convs or (2,) * num_stages
    stage_voxels = float(prod(patch))
    values = 0.0
    for stage in range(num_stages):
        if stage > 0:
            stage_voxels /= prod(network.strides[stage - 1])
        input_channels = num_channels if stage == 0 else channels[stage]
        num_tensors = 2 * stage_convs[stage]
        if stage < num_stages - 1:  # the coarsest stage has no decoder
            num_tensors += 2 + 2 * decoder_convs[stage]
        values += stage_voxels * (channels[stage] * num_tensors + input_channels)
    half_copy_bytes = value_bytes if value_bytes < 4 else 0
    # at the finest stage: the first gradients, or the loss, whichever takes more
    loss_bytes = (_LOSS_BYTES + half_copy_bytes) * num_classes
    end_bytes = prod(patch) * max(2 * channels[0] * value_bytes, loss_bytes)
    weight_bytes = num_weights(network, num_channels, num_classes) * (_WEIGHT_BYTES + half_copy_bytes)
    kept_share = _KEPT_SHARE[budget.activation_checkpointing]
    return weight_bytes + batch_size * (values * value_bytes + end_bytes) * kept_share
