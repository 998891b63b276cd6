"""From native voxels to network input, and back: orientation, crop, spacing, normalisation.

Preparation, validation and prediction all use these functions, so they cannot differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from scipy.ndimage import find_objects, gaussian_filter
from torch import Tensor
from torch.nn import functional as F

from medconv.data.case import Grid
from medconv.data.io.raster import are_picture_channels
from medconv.data.preprocessing.normalisation import normalise
from medconv.data.preprocessing.resampling import zoom, zoom_label
from medconv.targets.label_map import highest

NORMALISATIONS = ("zscore", "ct", "dataset", "rescale", "none")
DATASET_NORMALISATIONS = ("ct", "dataset")  # use the intensities of all cases
_RAS = np.array([[0, 1], [1, 1], [2, 1]], dtype=float)  # an orientation, as nibabel has them
Box = tuple[slice, ...]


@dataclass(frozen=True)
class PreprocessingConfig:
    """How images become network input; saved in every checkpoint.

    Args:
        spatial_dims: of the network input.
        spacing_mm: the grid to resample to, per spatial axis of the network input.
        normalisation: one name of `NORMALISATIONS` per channel.
        intensities: per channel, see `Fingerprint`; used by `ct` and `dataset`.
        slice_axis: across the slices of volumes that a 2D network takes, else None; cases keep their spacing.
        frame: for image-level targets, the final size in voxels: a centre crop, or padded with 0.
            None: images are cropped to their content and differ in size.
        resize: voxels to scale each image to, instead of `spacing_mm`.
    """

    spatial_dims: int
    spacing_mm: tuple[float, ...]
    normalisation: tuple[str, ...]
    intensities: tuple[dict[str, float], ...]
    slice_axis: int | None = None
    frame: tuple[int, ...] | None = None
    resize: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_normalisation(self.normalisation)
        if len(self.spacing_mm) != self.spatial_dims or any(not s > 0 for s in self.spacing_mm):
            what = f"{self.spatial_dims} positive numbers in mm"
            raise ValueError(f"data.spacing_mm needs {what}, got {self.spacing_mm}")

    @property
    def image_dims(self) -> int:
        """Axes of a prepared image: 3 also if the network takes slices of volumes."""
        return self.spatial_dims if self.slice_axis is None else self.spatial_dims + 1

    def target_mm(self, spacing_mm: Sequence[float]) -> tuple[float, ...]:
        """Target spacing for an image of this canonical spacing, one number per axis of that image."""
        if (axis := self.slice_axis) is None:
            return self.spacing_mm
        return (*self.spacing_mm[:axis], spacing_mm[axis], *self.spacing_mm[axis:])


def left_right_axis(slice_axis: int | None) -> int | None:
    """The axis of the network input from left to right: the first; None for sagittal slices."""
    return None if slice_axis == 0 else 0


def normalisation_for(
    normalisation: str | Sequence[str] | None, modalities: Sequence[str]
) -> tuple[str, ...]:
    """One normalisation per channel: as given (one name for all, or one each), else `ct` for CT,
    `dataset` for pictures and `zscore` for the rest.

    Raises: ValueError: unknown names, or not one per channel.
    """
    if normalisation is None:
        if are_picture_channels(tuple(modalities)):
            return ("dataset",) * len(modalities)
        return tuple("ct" if name.strip().lower() == "ct" else "zscore" for name in modalities)
    one = isinstance(normalisation, str) or not isinstance(normalisation, Sequence)
    names: tuple[Any, ...] = (normalisation,) * len(modalities) if one else tuple(normalisation)
    if len(names) != len(modalities):
        what = f"one name, or one for each of {len(modalities)} channels"
        raise ValueError(f"data.normalisation needs {what}, got {names}")
    _check_normalisation(names)
    return names


def _check_normalisation(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in NORMALISATIONS]
    if unknown:
        raise ValueError(f"data.normalisation must be one of {NORMALISATIONS} per channel, got {unknown}")


@dataclass(frozen=True)
class CropInfo:
    """Position of a prepared image in its native grid; needed to restore predictions.

    Args: box: (start, stop) of the content per canonical axis. shape: canonical, before the crop.
    """

    grid: Grid
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def slices(self) -> Box:
        return tuple(slice(a, b) for a, b in self.box)

    @property
    def native_spacing_mm(self) -> tuple[float, ...]:
        """Right, anterior, superior."""
        return _canonical_spacing(self.grid)

    def spacing_mm(self, shape: Sequence[int]) -> tuple[float, ...]:
        """Spacing of the prepared image with this shape, one number per axis."""
        spacing = _canonical_spacing(self.grid)
        return tuple(mm * (b - a) / n for mm, (a, b), n in zip(spacing, self.box, shape, strict=False))


def to_canonical(array: np.ndarray, grid: Grid) -> tuple[np.ndarray, tuple[float, ...]]:
    """Reorient the axes to right, anterior, superior by flips and permutations; a single slice is unchanged.

    Shape: (channels, X, Y, Z) -> (channels, R, A, S). Returns: the array and its spacing in mm.
    """
    return _reorient(array, _orientation(grid)), _canonical_spacing(grid)


def content_box(image: np.ndarray) -> Box:
    """Bounding box of the voxels that are not 0 in some channel; (channels, *spatial) -> slices."""
    boxes = find_objects((image != 0).any(0).view(np.uint8))
    return boxes[0] if boxes else tuple(slice(0, n) for n in image.shape[1:])


def preprocess(image: np.ndarray, grid: Grid, config: PreprocessingConfig) -> tuple[np.ndarray, CropInfo]:
    """Native voxels to network input.

    Shape: (channels, X, Y, Z) -> (channels, *spatial) float32, spatial being 2 or 3 axes.
    Raises: ValueError: a channel that cannot be normalised or resampled to finite values that differ.
    """
    canonical, spacing = to_canonical(image, grid)
    box = content_box(canonical) if config.frame is None else tuple(slice(0, n) for n in canonical.shape[1:])
    cropped = canonical[(slice(None), *box)]
    crop_info = CropInfo(grid, canonical.shape[1:], tuple((s.start, s.stop) for s in box))
    normalised = [_normalised(cropped, i, config) for i in range(len(cropped))]
    if config.resize is not None:
        prepared = np.stack([_scaled(c, (*config.resize, 1)[: c.ndim]) for c in normalised])
    else:
        shape = resampled_shape(cropped.shape[1:], spacing, config.target_mm(spacing))
        with np.errstate(over="ignore", invalid="ignore"):  # said below, with the range
            prepared = np.stack([zoom(c, shape) for c in normalised])
    prepared = _drop_slice(prepared, config.image_dims)
    prepared = prepared if config.frame is None else framed(prepared, config.frame)
    prepared = prepared.astype(np.float32)
    if not np.isfinite(prepared).all():
        low, high = float(image.min()), float(image.max())
        raise ValueError(f"values from {low:.4g} to {high:.4g} are not finite any more once resampled")
    return prepared, crop_info


def _normalised(image: np.ndarray, index: int, config: PreprocessingConfig) -> np.ndarray:
    try:
        return normalise(image[index], config.normalisation[index], config.intensities[index])
    except ValueError as error:
        raise ValueError(f"channel {index}: {error}") from error


def framed(image: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Centre crop, padded with 0 if the image is smaller: (channels, *spatial) -> (channels, *size)."""
    missing = [max(0, new - n) for n, new in zip(image.shape[1:], size, strict=True)]
    padded = np.pad(image, [(0, 0), *((n // 2, n - n // 2) for n in missing)])
    starts = [(n - new) // 2 for n, new in zip(padded.shape[1:], size, strict=True)]
    box = (slice(start, start + new) for start, new in zip(starts, size, strict=True))
    return np.ascontiguousarray(padded[(slice(None), *box)])


def preprocess_label(
    label: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig, num_classes: int
) -> np.ndarray:
    """A native label map on the grid of its prepared image; no new values appear.

    Shape: (X, Y, Z) -> (*spatial) uint8 or int16.
    """
    canonical, spacing = to_canonical(label[None], crop_info.grid)
    cropped = canonical[(slice(None), *crop_info.slices)]
    shape = resampled_shape(cropped.shape[1:], spacing, config.target_mm(spacing))
    resampled = zoom_label(cropped[0], shape, num_classes)[None]
    dtype = np.uint8 if num_classes <= 256 else np.int16
    label = _drop_slice(resampled, config.image_dims)[0]
    return label.astype(dtype)


def restore(
    logits: Tensor, crop_info: CropInfo, decode: Callable[[Iterable[Tensor]], Tensor] = highest
) -> np.ndarray:
    """Logits to a label map on the native grid; outside the content it is background.

    Shape: (outputs, *spatial) -> (X, Y, Z) int16.
    Args: decode: channels of logits, one (*spatial) at a time, to label values (*spatial); default: argmax.
    """
    return to_native(decode(on_content_grid(logits, crop_info)).cpu().numpy(), crop_info)


def on_content_grid(logits: Tensor, crop_info: CropInfo) -> Iterator[Tensor]:
    """The channels of a prediction on the grid of the native content, one at a time: all of them in memory
    would be 63 GB for 100 classes and 512 x 512 x 600 voxels.

    Shape: (outputs, *spatial) -> each (R, A, S) float32.
    """
    size = [b - a for a, b in crop_info.box]
    for channel in logits:
        scores = channel.float().reshape(*channel.shape, *(1,) * (3 - channel.ndim))
        if list(scores.shape) != size:
            scores = F.interpolate(scores[None, None], size=size, mode="trilinear", align_corners=False)[0, 0]
        yield scores


def to_native(content: np.ndarray, crop_info: CropInfo, outside: float = 0) -> np.ndarray:
    """Values of the content, in canonical axes, on the native grid: (R, A, S) -> (X, Y, Z)."""
    full = np.full(crop_info.shape, outside, content.dtype)
    full[crop_info.slices] = content
    back = nib.orientations.ornt_transform(_RAS, _orientation(crop_info.grid))
    return np.ascontiguousarray(_reorient(full[None], back)[0])


def resampled_shape(
    shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]
) -> tuple[int, ...]:
    """Voxels per axis after resampling to `target` mm; axes missing in `target` (a single slice) stay."""
    scaled = [max(1, round(n * s / t)) for n, s, t in zip(shape, spacing, target, strict=False)]
    return (*scaled, *shape[len(target) :])


def _scaled(channel: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Resize, with a Gaussian blur along axes that shrink, against aliasing.

    Source: the width of the Gaussian is scikit-image's, `transform.resize(anti_aliasing=True)`.
    """
    sigma = [max(0.0, (n / new - 1) / 2) for n, new in zip(channel.shape, shape, strict=True)]
    return zoom(gaussian_filter(channel, sigma, mode="nearest") if any(sigma) else channel, shape)


def _orientation(grid: Grid) -> np.ndarray:
    return _RAS if grid.shape[2] == 1 else nib.orientations.io_orientation(grid.matrix)


def _canonical_spacing(grid: Grid) -> tuple[float, ...]:
    spacing = np.empty(3)
    spacing[_orientation(grid)[:, 0].astype(int)] = grid.spacing_mm
    return tuple(float(s) for s in spacing)


def _reorient(array: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    return np.stack([nib.orientations.apply_orientation(channel, orientation) for channel in array])


def _drop_slice(array: np.ndarray, image_dims: int) -> np.ndarray:
    return np.ascontiguousarray(array[..., 0] if image_dims == 2 else array)
