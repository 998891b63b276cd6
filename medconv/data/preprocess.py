"""From native voxels to what the network sees, and back: orientation, crop, spacing, normalisation.

Preparation, validation and prediction all pass through here, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import nibabel as nib
import numpy as np
from scipy import ndimage
from torch import Tensor
from torch.nn import functional as F

from medconv.data.case import Grid

NORMALISATIONS = ("zscore", "ct", "rescale", "none")
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Recipe:
    """How images become network input; saved with every checkpoint.

    Args:
        spacing_mm: the grid to resample to, one number per spatial axis (right, anterior, superior).
        normalisation: one name of `NORMALISATIONS` per channel.
        intensities: per channel the dataset's foreground statistics (see `Fingerprint`), which `ct` uses.
    """

    spatial_dims: int
    spacing_mm: tuple[float, ...]
    normalisation: tuple[str, ...]
    intensities: tuple[dict[str, float], ...]

    def __post_init__(self) -> None:
        unknown = [n for n in self.normalisation if n not in NORMALISATIONS]
        if unknown:
            raise ValueError(f"data.normalisation must be one of {NORMALISATIONS} per channel, got {unknown}")
        if len(self.spacing_mm) != self.spatial_dims or any(not s > 0 for s in self.spacing_mm):
            raise ValueError(f"data.spacing_mm needs {self.spatial_dims} positive numbers in mm, got {self.spacing_mm}")


def normalisation_for(wanted: str | Sequence[str] | None, modalities: Sequence[str]) -> tuple[str, ...]:
    """One normalisation per channel: as wanted (one name for all, or one each), else `ct` for CT and `zscore` for the rest.

    Raises: ValueError: not as many names as channels.
    """
    if wanted is None:
        return tuple("ct" if name.strip().lower() == "ct" else "zscore" for name in modalities)
    names = (wanted,) * len(modalities) if isinstance(wanted, str) else tuple(wanted)
    if len(names) != len(modalities):
        raise ValueError(f"data.normalisation needs one name, or one for each of {len(modalities)} channels, got {names}")
    return names


@dataclass(frozen=True)
class Placement:
    """Where a prepared image lies in its native grid; enough to put a prediction back.

    Args: box: (start, stop) per canonical axis, of the content. shape: canonical shape before the crop, voxels.
    """

    grid: Grid
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def slices(self) -> Box:
        return tuple(slice(a, b) for a, b in self.box)


def to_canonical(array: np.ndarray, grid: Grid) -> tuple[np.ndarray, tuple[float, ...]]:
    """Turn the axes to right, anterior, superior by flips and permutations; a single slice stays as it is.

    Shape: (channels, X, Y, Z) -> (channels, R, A, S). Returns: the array and its spacing in mm.
    """
    orientation = _orientation(grid)
    spacing = np.empty(3)
    spacing[orientation[:, 0].astype(int)] = grid.spacing_mm
    return _reorient(array, orientation), tuple(float(s) for s in spacing)


def content_box(image: np.ndarray) -> Box:
    """The smallest box that holds every voxel that is not 0 in some channel; (channels, *spatial) -> slices."""
    found = ndimage.find_objects((image != 0).any(0).astype(np.uint8))
    return tuple(found[0]) if found else tuple(slice(0, n) for n in image.shape[1:])


def preprocess(image: np.ndarray, grid: Grid, recipe: Recipe) -> tuple[np.ndarray, Placement]:
    """Native voxels to network input.

    Shape: (channels, X, Y, Z) -> (channels, *spatial) float32, spatial being 2 or 3 axes.
    """
    canonical, spacing = to_canonical(image, grid)
    box = content_box(canonical)
    cropped = canonical[(slice(None), *box)]
    placement = Placement(grid, canonical.shape[1:], tuple((s.start, s.stop) for s in box))
    normalised = np.stack([_normalise(c, i, recipe) for i, c in enumerate(cropped)])
    shape = resampled_shape(cropped.shape[1:], spacing, recipe.spacing_mm)
    resampled = np.stack([_zoom(c, shape, order=3) for c in normalised])
    return _drop_slice(resampled, recipe.spatial_dims), placement


def preprocess_label(label: np.ndarray, placement: Placement, recipe: Recipe, num_classes: int) -> np.ndarray:
    """A native label map on the grid of its prepared image; no value appears that was not there before.

    Shape: (X, Y, Z) -> (*spatial) uint8 or int16.
    """
    canonical, spacing = to_canonical(label[None], placement.grid)
    cropped = canonical[(slice(None), *placement.slices)]
    shape = resampled_shape(cropped.shape[1:], spacing, recipe.spacing_mm)
    if shape != cropped.shape[1:]:
        masks = np.stack([_zoom((cropped[0] == c).astype(np.float32), shape, order=1) for c in range(num_classes)])
        cropped = masks.argmax(0)[None]
    dtype = np.uint8 if num_classes <= 256 else np.int16
    return _drop_slice(cropped, recipe.spatial_dims)[0].astype(dtype)


def restore(logits: Tensor, placement: Placement) -> np.ndarray:
    """The label map that a prediction means, on the native grid; outside the content it is background.

    Shape: (classes, *spatial) -> (X, Y, Z) int16.
    """
    size = [b - a for a, b in placement.box]
    scores = logits.float().reshape(len(logits), *logits.shape[1:], *(1,) * (4 - logits.ndim))
    if list(scores.shape[1:]) != size:
        scores = F.interpolate(scores[None], size=size, mode="trilinear", align_corners=False)[0]
    label = np.zeros(placement.shape, np.int16)
    label[placement.slices] = scores.argmax(0).cpu().numpy()
    back = nib.orientations.ornt_transform(_identity(), _orientation(placement.grid))
    return np.ascontiguousarray(_reorient(label[None], back)[0])


def resampled_shape(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> tuple[int, ...]:
    """Voxels per axis after resampling to `target` mm; axes that `target` does not name (a single slice) stay."""
    scaled = [max(1, round(n * s / t)) for n, s, t in zip(shape, spacing, target, strict=False)]
    return (*scaled, *shape[len(target) :])


def _normalise(channel: np.ndarray, index: int, recipe: Recipe) -> np.ndarray:
    name = recipe.normalisation[index]
    if name == "zscore":
        return (channel - channel.mean()) / max(float(channel.std()), 1e-8)
    if name == "rescale":
        low, high = float(channel.min()), float(channel.max())
        return (channel - low) / max(high - low, 1e-8)
    if name == "ct":
        known = recipe.intensities[index]
        clipped = channel.clip(known["percentile_00_5"], known["percentile_99_5"])
        return (clipped - known["mean"]) / max(known["std"], 1e-8)
    return channel


def _zoom(volume: np.ndarray, shape: Sequence[int], order: int) -> np.ndarray:
    """Spline resampling in which the outer edges of the first and last voxels stay where they are."""
    if tuple(shape) == volume.shape:
        return volume.astype(np.float32)
    factors = [new / old for new, old in zip(shape, volume.shape, strict=True)]
    return ndimage.zoom(volume.astype(np.float32), factors, order=order, mode="nearest", grid_mode=True)


def _orientation(grid: Grid) -> np.ndarray:
    return _identity() if grid.shape[2] == 1 else nib.orientations.io_orientation(grid.matrix)


def _identity() -> np.ndarray:
    return np.array([[0, 1], [1, 1], [2, 1]], dtype=float)


def _reorient(array: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    return np.stack([nib.orientations.apply_orientation(channel, orientation) for channel in array])


def _drop_slice(array: np.ndarray, spatial_dims: int) -> np.ndarray:
    return np.ascontiguousarray(array[..., 0] if spatial_dims == 2 else array)
