"""From a dataset's fingerprint to target spacing, patch, strides and kernels; stands between check and prepare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medconv.data.check import Fingerprint

_MAX_STEPS = 5  # down-samplings
_MIN_EDGE = 4  # voxels along an axis at the coarsest stage
_BASE_CHANNELS, _MAX_CHANNELS = 32, 320
_MAX_PATCH_VOXELS = {2: 512 * 512, 3: 96 * 96 * 96}


@dataclass(frozen=True)
class Plan:
    """What the network and the patches are built from; axes right, anterior, superior.

    Args:
        patch_size: voxels at `spacing_mm`, divisible by the product of the strides along each axis.
        strides: per step between stages, one number per axis. kernel_sizes, channels: per stage, finest first.
    """

    spacing_mm: tuple[float, ...]
    patch_size: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    kernel_sizes: tuple[tuple[int, ...], ...]
    channels: tuple[int, ...]


def target_spacing(fingerprint: Fingerprint) -> tuple[float, ...]:
    """The median spacing; across thick slices (over 3 times the finest axis) the 10th percentile, which keeps detail."""
    spacings = np.array(fingerprint.spacings_mm)
    target = np.median(spacings, axis=0)
    thick = target > 3 * target.min()
    target[thick] = np.percentile(spacings, 10, axis=0)[thick]
    return tuple(round(float(t), 4) for t in target)


def slice_axis(fingerprint: Fingerprint, spatial_dims: int | None) -> int | None:
    """The axis across the slices that a network of so many dimensions takes from volumes: that of the coarsest spacing, the
    last of several; None where it takes the images as they are.

    Raises: ValueError: the data has no such dimensions.
    Source: as nnU-Net's 2d configuration; Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    if spatial_dims not in (None, 2, 3):
        raise ValueError(f"data.spatial_dims must be 2, 3 or null (what the data has), got {spatial_dims}")
    if spatial_dims == 3 and fingerprint.spatial_dims == 2:
        raise ValueError("data.spatial_dims=3 needs volumes, the images of this dataset have one slice; take 2 or null")
    if spatial_dims in (None, fingerprint.spatial_dims):
        return None
    spacing = target_spacing(fingerprint)
    return max(range(3), key=lambda axis: (spacing[axis], axis))


def across(fingerprint: Fingerprint, axis: int) -> Fingerprint:
    """The fingerprint of the slices that lie across an axis: what a 2D network is planned from."""

    def within(rows: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        return tuple(row[:axis] + row[axis + 1 :] for row in rows)

    shapes, spacings = within(fingerprint.shapes), within(fingerprint.spacings_mm)
    return replace(fingerprint, spatial_dims=2, shapes=shapes, spacings_mm=spacings)


def plan(
    fingerprint: Fingerprint, spacing_mm: Sequence[float] | None = None, patch_size: Sequence[int] | None = None
) -> Plan:
    """Plan a U-Net for a dataset; a given spacing or patch size is kept as it is.

    The patch is the median image, shrunk along its longest axes until it fits, then rounded up to what the strides
    divide. An axis is halved while it keeps `_MIN_EDGE` voxels and its spacing is below twice the finest one.
    Source: the rules follow Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    spacing = tuple(float(s) for s in spacing_mm) if spacing_mm else target_spacing(fingerprint)
    _need_axes("data.spacing_mm", spacing, fingerprint.spatial_dims)
    patch = tuple(patch_size) if patch_size else _median_shape(fingerprint, spacing)
    _need_axes("data.patch_size", patch, fingerprint.spatial_dims)
    if patch_size is None:
        patch = _shrink(patch, _MAX_PATCH_VOXELS[len(patch)])
    strides = _strides(patch, spacing)
    divisor = np.prod(np.array(strides, int).reshape(-1, len(patch)), axis=0)
    if patch_size is None:
        patch = tuple(int(-(-p // d) * d) for p, d in zip(patch, divisor, strict=True))
    channels = tuple(min(_BASE_CHANNELS * 2**i, _MAX_CHANNELS) for i in range(len(strides) + 1))
    return Plan(spacing, patch, strides, _kernel_sizes(spacing, strides), channels)


def _need_axes(key: str, values: Sequence[float], spatial_dims: int) -> None:
    if len(values) != spatial_dims or any(not 0 < v < float("inf") for v in values):
        raise ValueError(f"{key} needs {spatial_dims} positive numbers, one per spatial axis, got {list(values)}")


def _median_shape(fingerprint: Fingerprint, spacing: Sequence[float]) -> tuple[int, ...]:
    shapes = np.array(fingerprint.shapes) * np.array(fingerprint.spacings_mm) / np.array(spacing)
    return tuple(max(_MIN_EDGE, round(n)) for n in np.median(shapes, axis=0))


def _shrink(patch: Sequence[int], max_voxels: int) -> tuple[int, ...]:
    sizes = list(patch)
    while np.prod(sizes, dtype=np.int64) > max_voxels:
        longest = int(np.argmax(sizes))
        sizes[longest] = max(_MIN_EDGE, int(sizes[longest] * 0.9))
    return tuple(sizes)


def _strides(patch: Sequence[int], spacing: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    size, voxel = np.array(patch, float), np.array(spacing, float)
    steps: list[tuple[int, ...]] = []
    while len(steps) < _MAX_STEPS:
        halve = (size / 2 >= _MIN_EDGE) & (voxel < 2 * voxel[size / 2 >= _MIN_EDGE].min(initial=np.inf))
        if not halve.any():
            break
        step = np.where(halve, 2, 1)
        steps.append(tuple(int(s) for s in step))
        size, voxel = size / step, voxel * step
    return tuple(steps)


def _kernel_sizes(spacing: Sequence[float], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """3 along every axis, but 1 across slices that are more than twice as thick as the finest axis."""
    voxel, kernels = np.array(spacing, float), []
    for step in (np.ones(len(spacing)), *np.array(strides)):
        voxel = voxel * step
        kernels.append(tuple(1 if v > 2 * voxel.min() else 3 for v in voxel))
    return tuple(kernels)
