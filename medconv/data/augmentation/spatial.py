"""One resampling for rotation, scaling, shift, elastic deformation and mirroring together.

On a CPU, 3D `grid_sample` works voxel by voxel. Gathering the eight neighbours of many voxels as vectors, in
pieces that stay in the cache, gives the same numbers in less than half of the time.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.utils.errors import ArgumentError
from medconv.utils.hardware import to_device

Array = TypeVar("Array", Tensor, np.ndarray)
_PIECE = 40_000  # voxels at once on a CPU: a dozen float32 vectors of that length fit into its second cache
ONE_BY_ONE = ("cpu",)  # devices on which samples are faster one at a time, without copies, than stacked
_EXACT = 2**24  # whole numbers that float32 holds


def mirrored_axes(axes: Any, spatial_dims: int) -> tuple[int, ...]:
    """The axes of `mirror_axes`. Raises: ArgumentError: neither different spatial axes nor `all`."""
    if axes == "all":
        return tuple(range(spatial_dims))
    is_list = isinstance(axes, Sequence) and not isinstance(axes, str)
    valid = is_list and all(type(axis) is int and 0 <= axis < spatial_dims for axis in axes)
    if not valid or len(set(axes)) != len(axes):
        axis_range = f"different spatial axes from 0 to {spatial_dims - 1}, or `all`"
        raise ArgumentError("mirror_axes", f" must be {axis_range}, got {axes}")
    return tuple(axes)


def resample(
    image: Tensor,
    label: Tensor | None,
    matrix: Tensor,
    shift: Tensor,
    field: Tensor | None,
    size: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """Linear interpolation for images, nearest neighbour for labels, 0 outside.

    The output voxel at p, counted from the centre of the output, shows the input at matrix @ p + shift +
    field(p), counted from the centre of the input.

    Shape:
        image (batch, channels, *source) float32, label (batch, 1, *source) -> the same with *size.
        matrix (batch, axes, axes), shift (batch, axes): in voxels, on the CPU.
        field (batch, axes, *size) or None: in voxels, on the image's device.
    """
    if not is_faster_stacked(label, image.ndim - 2, image.device):
        out = image.new_empty((*image.shape[:2], *size))
        out_label = None if label is None else label.new_empty((*label.shape[:2], *size))
        for i in range(len(image)):
            _gather(
                image[i],
                None if label is None else label[i],
                matrix[i].double(),
                shift[i].double(),
                None if field is None else field[i],
                out[i],
                None if out_label is None else out_label[i],
            )
        return out, out_label
    # `grid_sample` counts from -1 to 1, and its axes begin with the last.
    half = torch.tensor(image.shape[2:]) / 2
    # from voxels to units of half an edge, of the output on the right and of the input on the left
    linear = matrix * (torch.tensor(size) / 2) / half[:, None]
    offset = (shift / half).flip(1)[:, :, None]
    theta = torch.cat([linear.flip(1, 2), offset], dim=2)
    theta = to_device(theta.float(), image.device)
    half = to_device(half, image.device)
    return sample(image, label, theta, half, field, size)


def is_faster_stacked(label: object, spatial_dims: int, device: torch.device) -> bool:
    """Whether all samples at once are faster than one after the other: always of 2D images without labels."""
    return device.type not in ONE_BY_ONE or (label is None and spatial_dims == 2)


def reach(matrix: Array, shift: Array, size: Sequence[int]) -> Array:
    """How far from the centre the corners of an output of this size look, in voxels of the input.

    Shape: matrix (axes, axes), shift (axes,) -> (axes,); tensors or NumPy arrays.
    """
    distance = abs(shift)
    for axis, voxels in enumerate(size):
        distance = distance + abs(matrix[:, axis]) * (voxels - 1) / 2
    return distance


def spline_field(control: Tensor, size: Sequence[int], distance: Sequence[float]) -> Tensor:
    """A smooth displacement by cubic B-splines; it nowhere exceeds the largest of its control points.

    Shape: control (batch, axes, *points) as `control_points` counts them -> (batch, axes, *size).
    Args:
        distance: of control points, in voxels.
    Source: Rueckert et al. 1999, doi:10.1109/42.796284.
    """
    bases = []
    for voxels, spacing in zip(size, distance, strict=True):
        basis = _spline_basis(voxels, spacing)
        bases.append(to_device(basis, control.device))
    return bend(control, bases)


def bend(control: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Multiply by one matrix along each spatial axis. Shape: a basis (voxels, points)."""
    for axis, basis in enumerate(bases, start=2):
        control = (control.movedim(axis, -1) @ basis.T).movedim(-1, axis)
    return control


def control_points(size: Sequence[int], distance: Sequence[float]) -> tuple[int, ...]:
    """How many control points along each axis cover `size` voxels."""
    # One before the first voxel and two behind the last: four cubic splines overlap everywhere.
    return tuple(ceil((voxels - 1) / spacing) + 3 for voxels, spacing in zip(size, distance, strict=True))


@lru_cache(maxsize=32)
def _spline_basis(voxels: int, spacing: float) -> Tensor:
    """Cubic B-splines at each voxel; every row sums to 1. Shape: (voxels, points)."""
    (num_points,) = control_points((voxels,), (spacing,))
    position = torch.arange(voxels)[:, None] / spacing + 1  # counted in control points
    distance = (position - torch.arange(num_points)[None]).abs()
    # the two pieces of the cubic B-spline: up to one control point away, and up to two
    inner = 2 / 3 - distance**2 + distance**3 / 2
    outer = (2 - distance).clamp(min=0) ** 3 / 6
    return torch.where(distance < 1, inner, outer)


def sample(
    image: Tensor,
    label: Tensor | None,
    theta: Tensor,
    half: Tensor,
    field: Tensor | None,
    size: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """By `grid_sample`, whose axes begin with the last and whose positions are from -1 to 1; to
    `torch.compile` a whole graph.

    Shape: theta (batch, axes, axes + 1), half (axes,): of the image's voxels; the others as in `resample`.
    """
    grid = _grid(theta, size)
    if field is not None:
        displacement = field / half.reshape(-1, *(1,) * len(size))
        grid = grid + displacement.movedim(1, -1).flip(-1)
    resampled = F.grid_sample(image, grid, mode="bilinear", align_corners=False)
    if label is None:
        return resampled, None
    nearest = F.grid_sample(label.float(), grid, mode="nearest", align_corners=False)
    return resampled, nearest.to(label.dtype)


def _grid(theta: Tensor, size: Sequence[int]) -> Tensor:
    """As `affine_grid`, which is a matrix product: in TF32 it is off by up to a sixteenth of a voxel."""
    axes = len(size)
    # Columns of the matrices, each broadcastable to (batch, *size, axes); the last is the shift.
    columns = theta.movedim(-1, 0)
    columns = columns.reshape(axes + 1, len(theta), *(1,) * axes, axes)
    grid = columns[-1]
    for axis, voxels in enumerate(size):
        # Centres of the output voxels, from -1 to 1 between the outer edges.
        position = (2 * torch.arange(voxels, device=theta.device) + 1) / voxels - 1
        position = position.view(voxels, *(1,) * (axes - axis))
        grid = grid + columns[axes - 1 - axis] * position
    return grid


def _gather(
    image: Tensor,
    label: Tensor | None,
    matrix: Tensor,
    shift: Tensor,
    field: Tensor | None,
    out: Tensor,
    out_label: Tensor | None,
) -> None:
    """One sample, in pieces along the first axis, into `out` and `out_label`.

    Shape: image (channels, *source), label (1, *source), field (axes, *size); out (channels, *size).
    """
    size = out.shape[1:]
    axes = len(size)
    # How far from the centre voxels are shown, and where the centres of the source's last voxels are
    distance = reach(matrix, shift, size)
    if field is not None:
        distance = distance + field.abs().flatten(1).amax(1)
    limits = [(voxels - 1) / 2 - 1e-3 for voxels in image.shape[1:]]  # of a voxel, for rounding
    if any(far > limit for far, limit in zip(distance.tolist(), limits, strict=True)):
        frame = (1,) * 2 * axes  # of zeros: what comes in from outside
        image = F.pad(image, frame)
        label = None if label is None else F.pad(label, frame)
    source = image.shape[1:]
    strides = [prod(source[axis + 1 :]) for axis in range(axes)]
    lines = _lines(matrix, shift, source, size)
    voxels_per_row = prod(size[1:])
    rows_per_piece = max(1, _PIECE // voxels_per_row)
    for first in range(0, size[0], rows_per_piece):
        stop = min(size[0], first + rows_per_piece)
        piece = slice(first * voxels_per_row, stop * voxels_per_row)
        # positions of an affine map are sums of one number for each output axis: no product for each voxel
        positions = [along_first[first:stop] + along_others for along_first, along_others in lines]
        if field is not None:
            positions = [position + field[axis, first:stop] for axis, position in enumerate(positions)]
        corner, nearest, weights = _neighbours(positions, source, strides)
        if label is not None and out_label is not None:
            torch.index_select(label.reshape(-1), 0, nearest, out=out_label.reshape(-1)[piece])
        for channel, out_channel in zip(image, out, strict=True):
            out_channel.reshape(-1)[piece] = _blend(channel.reshape(-1), corner, strides, weights)


def _lines(
    matrix: Tensor, shift: Tensor, source: Sequence[int], size: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Per source axis its position as a sum: what the first output axis adds, and what the others add."""
    axes = len(size)
    steps = []  # from the centre along each output axis; broadcastable to *size
    for axis, voxels in enumerate(size):
        from_centre = torch.arange(voxels) - (voxels - 1) / 2
        steps.append(from_centre.reshape(*(1,) * axis, -1, *(1,) * (axes - 1 - axis)))
    lines = []
    for source_axis in range(axes):
        centre = (source[source_axis] - 1) / 2 + float(shift[source_axis])
        along_first = steps[0] * matrix[source_axis, 0] + centre
        along_others = torch.zeros(1)
        for axis in range(1, axes):
            along_others = along_others + steps[axis] * matrix[source_axis, axis]
        lines.append((along_first.float(), along_others.float()))
    return lines


def _neighbours(
    positions: Sequence[Tensor], source: Sequence[int], strides: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Flat indices of the lower corner and the nearest voxel, and the way from the corner along each axis."""
    # Indices are summed as floats, which is faster, as long as these hold them exactly.
    index_dtype = torch.float32 if prod(source) < _EXACT else torch.float64
    index = torch.zeros(1, dtype=index_dtype)
    weights: list[Tensor] = []
    for position, voxels, stride in zip(positions, source, strides, strict=True):
        # the largest float32 below, so that there is always an upper neighbour; 0 for a single voxel
        below = float(np.nextafter(np.float32(voxels - 1), np.float32(0)))
        inside = position.clamp(0, below)
        lower = inside.floor()
        weights.append(inside.sub_(lower).reshape(-1))
        index = index + lower.reshape(-1).to(index_dtype).mul_(stride)
    corner = index.to(torch.int64 if index_dtype == torch.float64 else torch.int32)
    for weight, stride in zip(weights, strides, strict=True):
        # the nearest voxel is the corner, or one further where more than half of the way is gone
        index.add_(weight.round(), alpha=stride)
    return corner, index.to(corner.dtype), weights


def _blend(values: Tensor, corner: Tensor, strides: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Linear interpolation along the first axis of what interpolation along the others gives."""
    if not weights:
        return values.index_select(0, corner)
    lower = _blend(values, corner, strides[1:], weights[1:])
    # the same indices into values that begin one stride later are the upper neighbours
    upper = _blend(values[strides[0] :], corner, strides[1:], weights[1:])
    return lower.lerp_(upper, weights[0])
