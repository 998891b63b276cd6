"""Points as heatmaps on the prepared grid, and back; as `Family.labels` also their check and reference."""

import math
from typing import Any

import numpy as np
import torch

from medconv.data.case import Case, Dataset, Grid
from medconv.data.io import raster
from medconv.data.io.grids import to_canonical
from medconv.data.io.images import shape_and_affine
from medconv.data.preprocessing.examine import CaseReport, note_content, samples_per_case
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, content_box, resampled_shape
from medconv.data.preprocessing.value_bands import sampled
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
    # a picture has no position across it
    voxels = voxels_of(positions, grid)[:, : 2 if raster.is_picture(case.images[0]) else 3]
    last = np.array(grid.shape)[: voxels.shape[1]] - 1
    beyond = [bool(row.any()) for row in (voxels < -0.5) | (voxels > last + 0.5)]
    in_margin = _in_margin(image, voxels)
    for name, position, is_beyond, is_cut in zip(
        dataset.targets.names, positions, beyond, in_margin, strict=True
    ):
        place = ", ".join(f"{mm:.4g}" for mm in position)
        if is_beyond:
            report.errors.append(
                f"{case.label}: {name} at ({place}) mm (RAS) lies outside of the image {case.images[0]}"
            )
        elif is_cut:
            report.warnings.append(
                f"{case.label}: {name} at ({place}) mm (RAS) lies where {case.images[0]} is 0 up to "
                "its edge, which is cut off; it is learned from what is left of its heatmap"
            )


def _in_margin(image: np.ndarray, voxels: np.ndarray) -> list[bool]:
    """Whether points lie where an image is 0 up to its edge. Shape: (channels, X, Y, Z), (n, 2 or 3)."""
    box = content_box(image)[: voxels.shape[1]]
    first = np.array([axis.start for axis in box]) - 0.5
    last = np.array([axis.stop for axis in box]) - 0.5
    return [bool(row.any()) for row in (voxels < first) | (voxels > last)]


def positions_of(case: Case, targets: LandmarkTargets) -> np.ndarray:
    """Positions of the points of a case; (names, 3) mm, NaN where absent.

    Raises: ValueError: no file, the header's spacing is wrong, or as `read_array`.
    """
    if case.label is None:
        raise ValueError("has no file of points, but training needs one")
    if case.source_spacing_mm is not None:
        header = Grid.of(*shape_and_affine(case.images[0]))
        stated = header.with_spacing_mm(case.source_spacing_mm)
        if not np.allclose(stated.spacing_mm, header.spacing_mm, rtol=1e-3):
            raise ValueError(
                f"{case.label}: its points are in mm of the image's header, but another spacing is taken "
                "(data.source_spacing_mm); write the true one into the headers"
            )
    return read_array(case.label, case.id, targets.names)


def moved(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Points under an affine map. Shape: (n, 3), (4, 4) -> (n, 3)."""
    result: np.ndarray = points @ matrix[:3, :3].T + matrix[:3, 3]
    return result


def voxels_of(positions: np.ndarray, grid: Grid) -> np.ndarray:
    """From mm to voxel indices of the file. Shape: (n, 3) twice."""
    return moved(positions, np.linalg.inv(grid.matrix))


def prepared_matrix(crop: CropInfo, shape: tuple[int, ...]) -> np.ndarray:
    """From voxel indices of a prepared image to mm. Shape: (4, 4)."""
    turns = crop.grid.canonical_axes if crop.reoriented else np.array([[0, 1], [1, 1], [2, 1]])
    to_file = np.zeros((4, 4))
    to_file[3, 3] = 1
    for axis, (prepared_axis, direction) in enumerate(turns.astype(int)):
        start, stop = crop.box[prepared_axis]
        step = (stop - start) / (*shape, 1)[prepared_axis]
        # the outer edges of the first and last voxels stay in place, as in `zoom`
        first = start + step / 2 - 0.5
        to_file[axis, prepared_axis] = direction * step
        to_file[axis, 3] = first if direction > 0 else crop.grid.shape[axis] - 1 - first
    matrix: np.ndarray = crop.grid.matrix @ to_file
    return matrix


def to_prepared(positions: np.ndarray, crop: CropInfo, shape: tuple[int, ...]) -> np.ndarray:
    """From mm to voxel indices of a prepared image. Shape: (n, 3) -> (n, axes)."""
    return moved(positions, np.linalg.inv(prepared_matrix(crop, shape)))[:, : len(shape)]


def to_mm(voxels: np.ndarray, crop: CropInfo, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_prepared`. Shape: (n, axes) -> (n, 3)."""
    missing = 3 - voxels.shape[1]  # of a slice, which is 0 along its third axis
    return moved(np.pad(voxels, ((0, 0), (0, missing))), prepared_matrix(crop, shape))


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

    Shape: (n, *spatial) -> (n, axes), (n,). The centre of mass around the highest voxel; along an axis on
    which the image ends there, the centre of a Gaussian of the heatmaps' width.
    """
    places = np.empty((len(heatmaps), heatmaps.ndim - 1))
    heights = np.empty(len(heatmaps))
    for number, heatmap in enumerate(heatmaps):
        highest = tuple(int(index) for index in np.unravel_index(int(heatmap.argmax()), heatmap.shape))
        heights[number] = heatmap[highest]
        places[number] = highest
        if heights[number] <= 0:
            continue
        reaches = [math.ceil(_REACH * width) for width in sigma]
        box = tuple(
            slice(max(0, index - reach), index + reach + 1)
            for index, reach in zip(highest, reaches, strict=True)
        )
        window = heatmap[box].astype(np.float64)
        window = np.where(window >= _FAINT * heights[number], window, 0)
        for axis, part in enumerate(box):
            if window.shape[axis] == 2 * reaches[axis] + 1:
                line = window.sum(tuple(other for other in range(window.ndim) if other != axis))
                places[number, axis] = (np.arange(part.start, part.stop) * line).sum() / window.sum()
            else:  # the mass lacks what would be beyond the edge
                through = tuple(
                    slice(None) if other == axis else index - box[other].start
                    for other, index in enumerate(highest)
                )
                line = window[through]
                places[number, axis] += _centre(line, highest[axis] - part.start, sigma[axis])
    return places, heights


def _centre(line: np.ndarray, highest: int, width: float) -> float:
    """Where a Gaussian of this width has its centre, from the highest value on: at most half a voxel away.

    The logarithm of such a line and x^2 / (2 width^2) add up to a straight line of slope centre / width^2.
    Shape: (n,).
    """
    indices = np.flatnonzero(line)
    offsets = indices - highest
    heights = np.log(line[indices]) + offsets**2 / (2 * width**2)
    weights = line[indices] ** 2  # where it is high, noise hardly changes its logarithm
    centred = offsets - np.average(offsets, weights=weights)
    spread = (weights * centred**2).sum()
    slope = (weights * centred * heights).sum() / spread if spread > 0 else 0.0
    return float(np.clip(slope * width**2, -0.5, 0.5))


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
