"""From native voxels to network input, and back: orientation, crop, spacing, normalisation.

Preparation, validation and prediction all use these functions, so they cannot differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.ndimage import binary_fill_holes, find_objects, gaussian_filter
from torch import Tensor
from torch.nn import functional as F

from medconv.data.case import Grid
from medconv.data.io.raster import are_picture_channels
from medconv.data.preprocessing.normalisation import normalise
from medconv.data.preprocessing.orientation import canonical_spacing, from_canonical, to_canonical
from medconv.data.preprocessing.resampling import nearest, nearest_axis, zoom, zoom_label, zoom_within_range
from medconv.targets.label_map import highest

NORMALISATIONS = ("zscore", "zscore_nonzero", "ct", "dataset", "rescale", "none")
CONVENTIONS = (None, "nnunet", "nnunet_ras")
DATASET_NORMALISATIONS = ("ct", "dataset")  # use the intensities of all cases
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
        convention: one of `CONVENTIONS`. `nnunet`: axes as stored and nnU-Net's resampling; `nnunet_ras`: its
            resampling alone, as with its readers that reorient.
    """

    spatial_dims: int
    spacing_mm: tuple[float, ...]
    normalisation: tuple[str, ...]
    intensities: tuple[dict[str, float], ...]
    slice_axis: int | None = None
    frame: tuple[int, ...] | None = None
    resize: tuple[int, ...] | None = None
    convention: str | None = None

    def __post_init__(self) -> None:
        _check_normalisation(self.normalisation)
        if len(self.spacing_mm) != self.spatial_dims or any(not s > 0 for s in self.spacing_mm):
            what = f"{self.spatial_dims} positive numbers in mm"
            raise ValueError(f"data.spacing_mm needs {what}, got {self.spacing_mm}")
        if self.convention not in CONVENTIONS:
            raise ValueError(f"data.convention must be nnunet, nnunet_ras or null, got {self.convention}")

    @property
    def reorients(self) -> bool:
        """Whether axes are turned to right, anterior, superior; else they stay as stored."""
        return self.convention != "nnunet"

    @property
    def image_dims(self) -> int:
        """Axes of a prepared image: 3 also if the network takes slices of volumes."""
        return self.spatial_dims if self.slice_axis is None else self.spatial_dims + 1

    def target_mm(self, spacing_mm: Sequence[float]) -> tuple[float, ...]:
        """Target spacing for an image of this canonical spacing, one number per axis of that image."""
        if (axis := self.slice_axis) is None:
            return self.spacing_mm
        return (*self.spacing_mm[:axis], spacing_mm[axis], *self.spacing_mm[axis:])

    def nearest_axis(self, spacing_mm: Sequence[float], target_mm: Sequence[float]) -> int | None:
        """The axis across thick slices, of which resampling takes the nearest; None: it interpolates."""
        flat = len(target_mm) < len(spacing_mm)
        return None if self.convention is None or flat else nearest_axis(spacing_mm, target_mm)


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

    Args:
        box: (start, stop) of the content per canonical axis. shape: canonical, before the crop.
        reoriented: whether the canonical axes are right, anterior, superior; else they are as stored.
        nearest_axis: across which predictions take the nearest slice; None: they are interpolated.
    """

    grid: Grid
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    reoriented: bool = True
    nearest_axis: int | None = None

    @property
    def slices(self) -> Box:
        return tuple(slice(a, b) for a, b in self.box)

    @property
    def native_spacing_mm(self) -> tuple[float, ...]:
        """Right, anterior, superior."""
        return canonical_spacing(self.grid, self.reoriented)

    def spacing_mm(self, shape: Sequence[int]) -> tuple[float, ...]:
        """Spacing of the prepared image with this shape, one number per axis."""
        spacing = self.native_spacing_mm
        return tuple(mm * (b - a) / n for mm, (a, b), n in zip(spacing, self.box, shape, strict=False))


def content_box(image: np.ndarray) -> Box:
    """Bounding box of the voxels that are not 0 in some channel; (channels, *spatial) -> slices."""
    boxes = find_objects((image != 0).any(0).view(np.uint8))
    return boxes[0] if boxes else tuple(slice(0, n) for n in image.shape[1:])


def preprocess(image: np.ndarray, grid: Grid, config: PreprocessingConfig) -> tuple[np.ndarray, CropInfo]:
    """Native voxels to network input.

    Shape: (channels, X, Y, Z) -> (channels, *spatial) float32, spatial being 2 or 3 axes.
    Raises: ValueError: a channel that cannot be normalised or resampled to finite values that differ.
    """
    canonical, spacing = to_canonical(image, grid, config.reorients)
    box = content_box(canonical) if config.frame is None else tuple(slice(0, n) for n in canonical.shape[1:])
    cropped = canonical[(slice(None), *box)]
    back = config.nearest_axis(config.target_mm(spacing), spacing)
    limits = tuple((s.start, s.stop) for s in box)
    crop_info = CropInfo(grid, canonical.shape[1:], limits, config.reorients, back)
    mask = binary_fill_holes((cropped != 0).any(0)) if "zscore_nonzero" in config.normalisation else None
    normalised = [_normalised(cropped, i, config, mask) for i in range(len(cropped))]
    if config.resize is not None:
        prepared = np.stack([_scaled(c, (*config.resize, 1)[: c.ndim]) for c in normalised])
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # said below, with the range
            prepared = np.stack([_resampled(c, spacing, config) for c in normalised])
    prepared = _drop_slice(prepared, config.image_dims)
    prepared = prepared if config.frame is None else framed(prepared, config.frame)
    prepared = prepared.astype(np.float32)
    if not np.isfinite(prepared).all():
        low, high = float(image.min()), float(image.max())
        raise ValueError(f"values from {low:.4g} to {high:.4g} are not finite any more once resampled")
    return prepared, crop_info


def _resampled(channel: np.ndarray, spacing: Sequence[float], config: PreprocessingConfig) -> np.ndarray:
    target = config.target_mm(spacing)
    shape = resampled_shape(channel.shape, spacing, target)
    if config.convention is None:
        return zoom(channel, shape)
    return zoom_within_range(channel, shape, config.nearest_axis(spacing, target))


def _normalised(
    image: np.ndarray, index: int, config: PreprocessingConfig, mask: np.ndarray | None
) -> np.ndarray:
    try:
        return normalise(image[index], config.normalisation[index], config.intensities[index], mask)
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
    canonical, spacing = to_canonical(label[None], crop_info.grid, config.reorients)
    cropped = canonical[(slice(None), *crop_info.slices)]
    target = config.target_mm(spacing)
    shape = resampled_shape(cropped.shape[1:], spacing, target)
    if (axis := config.nearest_axis(spacing, target)) is not None:
        cropped = cropped.take(nearest(cropped.shape[1 + axis], shape[axis]), 1 + axis)
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
    size, axis = [b - a for a, b in crop_info.box], crop_info.nearest_axis
    for channel in logits:
        scores = channel.float().reshape(*channel.shape, *(1,) * (3 - channel.ndim))
        if axis is not None and scores.shape[axis] != size[axis]:
            indices = torch.from_numpy(nearest(scores.shape[axis], size[axis]))
            scores = scores.index_select(axis, indices.to(scores.device))
        if list(scores.shape) != size:
            scores = F.interpolate(scores[None, None], size=size, mode="trilinear", align_corners=False)[0, 0]
        yield scores


def to_native(content: np.ndarray, crop_info: CropInfo, outside: float = 0) -> np.ndarray:
    """Values of the content, in canonical axes, on the native grid: (R, A, S) -> (X, Y, Z)."""
    full = np.full(crop_info.shape, outside, content.dtype)
    full[crop_info.slices] = content
    return from_canonical(full, crop_info.grid, crop_info.reoriented)


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


def _drop_slice(array: np.ndarray, image_dims: int) -> np.ndarray:
    return np.ascontiguousarray(array[..., 0] if image_dims == 2 else array)
