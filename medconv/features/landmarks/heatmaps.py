"""Points as heatmaps on the prepared grid, and back; as `Family.labels` also their check and reference."""

import math
from typing import Any

import numpy as np
import torch

from medconv.data.case import Case, Dataset, Grid
from medconv.data.io.grids import to_canonical
from medconv.data.preprocessing.examine import CaseReport, note_content, sampled, samples_per_case
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, resampled_shape
from medconv.features.landmarks.points import read_array
from medconv.features.landmarks.targets import LandmarkTargets

_REACH = 3  # sigma around the highest voxel, of which the centre of mass is taken
_FAINT = 0.1  # of the maximum; less is no part of a peak


def examine_points(case: Case, image: np.ndarray | None, dataset: Dataset, report: CaseReport) -> None:
    """As `Family.examine`."""
    assert isinstance(dataset.targets, LandmarkTargets)
    if image is None:
        return
    grid = report.grid
    assert grid is not None
    note_content(image, report)
    report.intensities = sampled(image, samples_per_case(dataset))
    try:
        positions = positions_of(case, dataset.targets)
    except ValueError as error:
        report.errors.append(str(error))
        return
    if np.isnan(positions).all():
        report.warnings.append(f"{case.label}: has none of the points; it is trained on as such")
    voxels = voxels_of(positions, grid)[:, : 2 if report.flat else 3]
    last = np.array(grid.shape)[: voxels.shape[1]] - 1
    beyond = [bool(row.any()) for row in (voxels < -0.5) | (voxels > last + 0.5)]
    for name, position, is_beyond in zip(dataset.targets.names, positions, beyond, strict=True):
        if is_beyond:
            place = ", ".join(f"{mm:.4g}" for mm in position)
            report.errors.append(
                f"{case.label}: {name} at ({place}) mm (RAS) lies outside of the image {case.images[0]}"
            )


def positions_of(case: Case, targets: LandmarkTargets) -> np.ndarray:
    """Positions of the points of a case; (names, 3) mm, NaN where absent.

    Raises: ValueError: no file, or as `read_array`.
    """
    if case.label is None:
        raise ValueError("has no file of points, but training needs one")
    return read_array(case.label, case.id, targets.names)


def voxels_of(positions: np.ndarray, grid: Grid) -> np.ndarray:
    """From mm to voxel indices of the file."""
    inverse = np.linalg.inv(grid.matrix)
    voxels: np.ndarray = positions @ inverse[:3, :3].T + inverse[:3, 3]
    return voxels


def _turns(crop: CropInfo) -> np.ndarray:
    """The prepared axis of each axis of the file, and its direction there."""
    return crop.grid.canonical_axes if crop.reoriented else np.array([[0, 1], [1, 1], [2, 1]])


def to_prepared(positions: np.ndarray, crop: CropInfo, shape: tuple[int, ...]) -> np.ndarray:
    """From mm to voxel indices of a prepared image. Shape: (n, 3) -> (n, axes)."""
    native = voxels_of(positions, crop.grid)
    prepared = np.empty_like(native)
    for axis, (canonical, direction) in enumerate(_turns(crop)):
        column = native[:, axis] if direction > 0 else crop.grid.shape[axis] - 1 - native[:, axis]
        start, stop = crop.box[int(canonical)]
        # the outer edges of the first and last voxels stay in place, as in `zoom`
        voxels = (*shape, 1)[int(canonical)]
        prepared[:, int(canonical)] = (column - start + 0.5) * voxels / (stop - start) - 0.5
    return prepared[:, : len(shape)]


def to_mm(voxels: np.ndarray, crop: CropInfo, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_prepared`. Shape: (n, axes) -> (n, 3)."""
    native = np.zeros((len(voxels), 3))
    for axis, (canonical, direction) in enumerate(_turns(crop)):
        index = int(canonical)
        if index < len(shape):
            start, stop = crop.box[index]
            column = (voxels[:, index] + 0.5) * (stop - start) / shape[index] - 0.5 + start
            native[:, axis] = column if direction > 0 else crop.grid.shape[axis] - 1 - column
    matrix = crop.grid.matrix
    positions: np.ndarray = native @ matrix[:3, :3].T + matrix[:3, 3]
    return positions


def sigmas(sigma_mm: float, crop: CropInfo, shape: tuple[int, ...]) -> np.ndarray:
    """Standard deviations of heatmaps in voxels, at least 1, so that a point between thick slices is seen."""
    return np.maximum(sigma_mm / np.array(crop.spacing_mm(shape)), 1.0)


def drawn(voxels: np.ndarray, sigma: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A Gaussian of height 1 for each point, 0 for one that is NaN.

    Shape: (n, axes) -> (n, *shape) float16.
    """
    heatmaps = np.zeros((len(voxels), *shape), np.float16)
    for heatmap, centre in zip(heatmaps, voxels, strict=True):
        if np.isnan(centre).any():
            continue
        volume: Any = np.float32(1)
        for axis, size in enumerate(shape):
            line = np.exp(-0.5 * ((np.arange(size) - centre[axis]) / sigma[axis]) ** 2).astype(np.float32)
            volume = volume[..., None] * line
        heatmap[...] = volume
    return heatmaps


def peaks(heatmaps: np.ndarray, sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each heatmap is highest, between voxels, and how high.

    Shape: (n, *spatial) -> (n, axes), (n,). The centre of mass around the highest voxel.
    """
    places = np.empty((len(heatmaps), heatmaps.ndim - 1))
    heights = np.empty(len(heatmaps))
    for number, heatmap in enumerate(heatmaps):
        highest = np.unravel_index(int(heatmap.argmax()), heatmap.shape)
        heights[number] = heatmap[highest]
        box = []
        for index, width, size in zip(highest, sigma, heatmap.shape, strict=True):
            # as far to both sides, also at the edge of the image: else the centre would be drawn inwards
            reach = min(math.ceil(_REACH * width), max(1, min(int(index), size - 1 - int(index))))
            box.append(slice(max(0, int(index) - reach), int(index) + reach + 1))
        window = heatmap[tuple(box)].astype(np.float64)
        window = np.where(window >= _FAINT * heights[number], window, 0)
        total = window.sum()
        for axis, part in enumerate(box):
            line = window.sum(tuple(other for other in range(window.ndim) if other != axis))
            indices = np.arange(part.start, part.start + len(line))
            places[number, axis] = (indices * line).sum() / total if total > 0 else int(highest[axis])
    return places, heights


def settings(targets: LandmarkTargets) -> Any:
    """As `Family.labels`."""
    return [targets.kind, list(targets.names), targets.sigma_mm]


def prepared(
    targets: LandmarkTargets, case: Case, image: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig
) -> tuple[np.ndarray, np.ndarray]:
    """As `Family.labels`: where some point is near, which patches are centred on; and the heatmaps.

    Shape: image (channels, X, Y, Z) -> (*spatial) uint8, (names, *spatial) float16.
    """
    _, spacing_mm = to_canonical(image[:1], crop_info.grid, config.reorients)
    shape = resampled_shape(crop_info.content_shape, spacing_mm, config.target_mm(spacing_mm))
    shape = shape[: config.image_dims]
    voxels = to_prepared(positions_of(case, targets), crop_info, shape)
    heatmaps = drawn(voxels, sigmas(targets.sigma_mm, crop_info, shape), shape)
    is_near = (heatmaps.max(0) > 0.5).astype(np.uint8)
    return is_near, heatmaps


def reference(targets: LandmarkTargets, case: Case, grid: Grid) -> dict[str, Any]:
    """As `Family.labels`: the positions, (names, 3) mm."""
    return {"reference": torch.from_numpy(positions_of(case, targets))}
