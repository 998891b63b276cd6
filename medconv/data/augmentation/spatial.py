"""One resampling for rotation, scaling, shift, elastic deformation and mirroring together.

On a CPU, 3D `grid_sample` works voxel by voxel. Gathering the eight neighbours of many voxels as vectors, in
pieces that stay in the cache, gives the same numbers in less than half of the time.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, prod
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.utils.hardware import to_device

Array = TypeVar("Array", Tensor, np.ndarray)
_PIECE = 40_000  # voxels at once on a CPU: a dozen float32 vectors of that length fit into its second cache
_EXACT = 2**24  # whole numbers that float32 holds


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

    Shape: image (batch, channels, *source) float32, label (batch, 1, *source) -> the same with *size.
        matrix (batch, axes, axes), shift (batch, axes), field (batch, axes, *size) or None: all in voxels, on
        a CPU but for `field`, which is where the image is.
    """
    if plain(label, image.ndim - 2) or not one_by_one(image.device):
        half = torch.tensor(image.shape[2:]) / 2
        linear = matrix * (torch.tensor(size) / 2) / half[:, None]
        theta = torch.cat([linear.flip(1, 2), (shift / half).flip(1)[:, :, None]], dim=2).float()
        theta, half = to_device(theta, image.device), to_device(half, image.device)
        return sample(image, label, theta, half, field, size)
    out = image.new_empty((*image.shape[:2], *size))
    out_label = None if label is None else label.new_empty((*label.shape[:2], *size))
    for i in range(len(image)):
        own, own_label, own_out = (None if x is None else x[i] for x in (field, label, out_label))
        _gather(image[i], own_label, matrix[i].double(), shift[i].double(), own, (out[i], own_out))
    return out, out_label


def one_by_one(device: torch.device) -> bool:
    """Whether samples are faster one at a time, without copies, than stacked."""
    return device.type == "cpu"


def plain(label: object, spatial_dims: int) -> bool:
    """Whether these are 2D images without label maps, which are always faster stacked."""
    return label is None and spatial_dims == 2


def reach(matrix: Array, shift: Array, size: Sequence[int]) -> Array:
    """How far from the centre the corners of an output of this size look, in voxels of the input.

    Shape: matrix (axes, axes), shift (axes,) -> (axes,); tensors or NumPy arrays.
    """
    return sum((abs(matrix[:, j]) * (n - 1) / 2 for j, n in enumerate(size)), abs(shift))


def spline_field(control: Tensor, size: Sequence[int], distance: Sequence[float]) -> Tensor:
    """A smooth displacement by cubic B-splines; it nowhere exceeds the largest of its control points.

    Shape: control (batch, axes, *points) as `control_points` counts them -> (batch, axes, *size).
    Args: distance: of control points, in voxels.
    Source: Rueckert et al. 1999, doi:10.1109/42.796284.
    """
    bases = [_spline_basis(n, far) for n, far in zip(size, distance, strict=True)]
    return bend(control, [to_device(basis, control.device) for basis in bases])


def bend(control: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Multiply by one matrix along each spatial axis. Shape: a basis (voxels, points)."""
    for axis, basis in enumerate(bases, start=2):
        control = (control.movedim(axis, -1) @ basis.T).movedim(-1, axis)
    return control


def control_points(size: Sequence[int], distance: Sequence[float]) -> tuple[int, ...]:
    """How many control points along each axis cover `size` voxels."""
    return tuple(ceil((n - 1) / far) + 3 for n, far in zip(size, distance, strict=True))


@lru_cache(maxsize=32)
def _spline_basis(n: int, far: float) -> Tensor:
    """Shape: (voxels, points); every row sums to 1."""
    (points,) = control_points((n,), (far,))
    away = (torch.arange(n)[:, None] / far + 1 - torch.arange(points)[None]).abs()
    near, outer = 2 / 3 - away**2 + away**3 / 2, (2 - away).clamp(min=0) ** 3 / 6
    return torch.where(away < 1, near, outer)


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
        grid = grid + (field / half.reshape(-1, *(1,) * len(size))).movedim(1, -1).flip(-1)
    resampled = F.grid_sample(image, grid, mode="bilinear", align_corners=False)
    if label is None:
        return resampled, None
    nearest = F.grid_sample(label.float(), grid, mode="nearest", align_corners=False)
    return resampled, nearest.to(label.dtype)


def _grid(theta: Tensor, size: Sequence[int]) -> Tensor:
    """As `affine_grid`, which is a matrix product: in TF32 it is off by up to a sixteenth of a voxel."""
    axes = len(size)
    rows = theta.movedim(-1, 0).reshape(axes + 1, len(theta), *(1,) * axes, axes)
    grid = rows[-1]
    for axis, n in enumerate(size):
        position = (2 * torch.arange(n, device=theta.device) + 1) / n - 1
        grid = grid + rows[axes - 1 - axis] * position.view(n, *(1,) * (axes - axis))
    return grid


def _gather(
    image: Tensor,
    label: Tensor | None,
    matrix: Tensor,
    shift: Tensor,
    field: Tensor | None,
    out: tuple[Tensor, Tensor | None],
) -> None:
    """One sample, in pieces along the first axis, into `out`."""
    size, axes = out[0].shape[1:], image.ndim - 1
    far = reach(matrix, shift, size) + (0 if field is None else field.abs().flatten(1).amax(1))
    if any(far[i] > (image.shape[1 + i] - 1) / 2 - 1e-3 for i in range(axes)):
        image = F.pad(image, (1,) * 2 * axes)  # a frame of what comes in from outside
        label = None if label is None else F.pad(label, (1,) * 2 * axes)
    source = image.shape[1:]
    strides = [prod(source[i + 1 :]) for i in range(axes)]
    lines = _lines(matrix, shift, source, size)
    flat, rows = image.reshape(len(image), -1), max(1, _PIECE // prod(size[1:]))
    pieces = out[0].reshape(len(image), -1)
    for start in range(0, size[0], rows):
        stop = min(size[0], start + rows)
        place = slice(start * prod(size[1:]), stop * prod(size[1:]))
        here = [first[start:stop] + rest for first, rest in lines]
        if field is not None:
            here = [position + field[i, start:stop] for i, position in enumerate(here)]
        corner, nearest, weights = _neighbours(here, source, strides)
        if label is not None and out[1] is not None:
            torch.index_select(label.reshape(-1), 0, nearest, out=out[1].reshape(-1)[place])
        for channel, values in zip(flat, pieces, strict=True):
            values[place] = _blend(channel, corner, strides, weights)


def _lines(
    matrix: Tensor, shift: Tensor, source: Sequence[int], size: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Per source axis its position as a sum: what the first output axis adds, and what the others add."""

    def along(i: int, j: int) -> Tensor:
        steps = (torch.arange(size[j]) - (size[j] - 1) / 2) * matrix[i, j]
        return steps.reshape(*(1,) * j, -1, *(1,) * (len(size) - 1 - j))

    centre = [(n - 1) / 2 + float(s) for n, s in zip(source, shift, strict=True)]
    rest = [sum((along(i, j) for j in range(1, len(size))), torch.zeros(1)) for i in range(len(size))]
    return [((along(i, 0) + centre[i]).float(), rest[i].float()) for i in range(len(size))]


def _neighbours(
    positions: Sequence[Tensor], source: Sequence[int], strides: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Flat indices of the lower corner and the nearest voxel, and the way from the corner along each axis."""
    weights: list[Tensor] = []
    index = torch.zeros(1, dtype=torch.float32 if prod(source) < _EXACT else torch.float64)
    for position, n, stride in zip(positions, source, strides, strict=True):
        inside = position.clamp(0, _below(n - 1))
        lower = inside.floor()
        weights.append(inside.sub_(lower).reshape(-1))
        index = index + lower.reshape(-1).to(index.dtype).mul_(stride)
    corner = index.to(torch.int64 if index.dtype == torch.float64 else torch.int32)
    for weight, stride in zip(weights, strides, strict=True):
        index.add_(weight.round(), alpha=stride)
    return corner, index.to(corner.dtype), weights


def _below(n: int) -> float:
    """The largest float32 below n, so that there is always an upper neighbour; 0 for a single voxel."""
    return float(np.nextafter(np.float32(n), np.float32(0)))


def _blend(values: Tensor, corner: Tensor, strides: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Linear interpolation along the first axis of what interpolation along the others gives."""
    if not weights:
        return values.index_select(0, corner)
    lower = _blend(values, corner, strides[1:], weights[1:])
    upper = _blend(values[strides[0] :], corner, strides[1:], weights[1:])
    return lower.lerp_(upper, weights[0])
