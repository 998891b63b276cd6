"""Pictures: images under their heatmaps, and points beside their references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from medconv.data.case import Grid
from medconv.data.io.grids import to_canonical
from medconv.data.io.images import read_image
from medconv.data.loading.patch import Batch
from medconv.features.landmarks.heatmaps import voxels_of
from medconv.features.landmarks.targets import LandmarkTargets
from medconv.features.pictures.drawing import heat, overlay, png

if TYPE_CHECKING:  # `evaluate` draws points, too, and loads no training
    from medconv.features.pictures.callbacks import Picture

_DOT_MM = 2.0  # radius of a point in a picture; at least a voxel, and a hundredth of the image


class PointViews:
    """The first validation cases; planes cross at the highest peak of all points."""

    def __init__(self, targets: LandmarkTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets = targets
        self.cases = cases
        self.spacing_mm = spacing_mm
        self._num_shown = 0

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        strength = label.float().amax(0).clamp(0, 1).cpu().numpy()
        return f"train/sample {number} (image, heatmaps)", heat(image[None], strength, self.spacing_mm)

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        if self._num_shown >= self.cases:
            return
        self._num_shown += 1
        image = batch["image"][0, 0].float().cpu().numpy()
        picture = heat(image[None], predicted["heatmap"], batch["spacing_mm"])
        yield f"val/{predicted['case']} (image, predicted heatmaps)", picture

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        return [], ""

    def worst(self, module: Any) -> Iterator[Picture]:
        return iter(())


def case_picture(
    image: Path, reference: np.ndarray, prediction: np.ndarray, names: Sequence[str]
) -> bytes | None:
    """An image, its reference points and the predicted ones, as PNG; planes cross at the worst point.

    Shape: reference, prediction (names, 3) mm, NaN where absent.
    Returns: None: the image cannot be read.
    """
    try:
        channels, grid = read_image([image])
    except ValueError:
        return None
    worst = worst_point(reference, prediction)
    ends = np.stack([prediction[worst], reference[worst]])
    focus = _dots(ends[np.isfinite(ends).all(1)][:1], grid)
    maps = np.stack([channels[0], _dots(reference, grid), _dots(prediction, grid), focus])
    canonical, spacing_mm = to_canonical(maps, grid)
    if grid.shape[2] == 1:
        canonical = canonical[..., 0]
    shown, *labels, in_focus = canonical
    return png(
        overlay(
            shown,
            [each.astype(np.uint8) for each in labels],
            spacing_mm[: shown.ndim],
            in_focus.astype(np.uint8),
            titles=("image", "reference", "prediction"),
            names=dict(enumerate(names, start=1)),
        )
    )


def worst_point(reference: np.ndarray, prediction: np.ndarray) -> int:
    """The point that is farthest from its reference; one that only one of both has is farther.

    Shape: (names, 3) mm, NaN where absent.
    """
    distances = np.linalg.norm(prediction - reference, axis=1)
    absent = np.isnan(prediction).any(1), np.isnan(reference).any(1)
    distances[absent[0] != absent[1]] = np.inf
    distances[absent[0] & absent[1]] = -1
    return int(distances.argmax())


def _dots(positions: np.ndarray, grid: Grid) -> np.ndarray:
    """A label map with a ball of the value 1, 2, ... at each point. Shape: (n, 3) mm -> (X, Y, Z) uint8."""
    label = np.zeros(grid.shape, np.uint8)
    extent_mm = np.array(grid.shape) * grid.spacing_mm
    radius = np.maximum(max(_DOT_MM, extent_mm.max() / 100) / np.array(grid.spacing_mm), 1)
    for value, centre in enumerate(voxels_of(positions, grid), start=1):
        if np.isfinite(centre).all():
            low = np.floor(centre - radius).astype(int).clip(0)
            high = np.ceil(centre + radius).astype(int).clip(0) + 1
            box = tuple(slice(start, stop) for start, stop in zip(low, high, strict=True))
            indices = np.indices(label[box].shape).reshape(3, -1).T + low
            is_inside = (((indices - centre) / radius) ** 2).sum(1) <= 1
            label[tuple(indices[is_inside].T)] = value
    return label
