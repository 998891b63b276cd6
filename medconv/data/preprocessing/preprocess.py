"""From native voxels to network input, and back: orientation, crop, spacing, normalisation.

Preparation, validation and prediction all use these functions, so they cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import binary_fill_holes

from medconv.data.case import Grid
from medconv.data.preprocessing.normalisation import check_normalisation, normalise
from medconv.data.preprocessing.orientation import canonical_spacing, from_canonical, to_canonical
from medconv.data.preprocessing.resampling import (
    nearest,
    nearest_axis,
    zoom,
    zoom_label,
    zoom_linear,
    zoom_within_range,
)
from medconv.utils.errors import ArgumentError

CONVENTIONS = (None, "nnunet", "nnunet_ras")
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
        check_normalisation(self.normalisation)
        are_positive = all(mm > 0 for mm in self.spacing_mm)
        if len(self.spacing_mm) != self.spatial_dims or not are_positive:
            raise ArgumentError(
                "spacing_mm", f" needs {self.spatial_dims} positive numbers in mm, got {self.spacing_mm}"
            )
        if self.convention not in CONVENTIONS:
            raise ArgumentError("convention", f" must be nnunet, nnunet_ras or None, got {self.convention}")

    @property
    def reorients(self) -> bool:
        """Whether axes are turned to right, anterior, superior; else they stay as stored."""
        return self.convention != "nnunet"

    @property
    def smooths(self) -> bool:
        """Whether images are smoothed before they become coarser.

        Whole images may become far coarser; patches hardly do, and gain nothing from it
        (experiments/classifiers.md).
        """
        return self.resize is not None or (self.frame is not None and self.convention is None)

    @property
    def image_dims(self) -> int:
        """Axes of a prepared image: 3 also if the network takes slices of volumes."""
        return self.spatial_dims if self.slice_axis is None else self.spatial_dims + 1

    def target_mm(self, spacing_mm: Sequence[float]) -> tuple[float, ...]:
        """Target spacing for an image of this canonical spacing, one number per axis of that image."""
        target = list(self.spacing_mm)
        if self.slice_axis is not None:
            target.insert(self.slice_axis, spacing_mm[self.slice_axis])
        return tuple(target)

    def nearest_axis(self, spacing_mm: Sequence[float], target_mm: Sequence[float]) -> int | None:
        """The axis across thick slices, of which resampling takes the nearest; None: it interpolates."""
        is_picture = len(target_mm) < len(spacing_mm)
        if self.convention is None or is_picture:
            return None
        return nearest_axis(spacing_mm, target_mm)


def left_right_axis(slice_axis: int | None) -> int | None:
    """The axis of the network input from left to right: the first; None for sagittal slices."""
    return None if slice_axis == 0 else 0


@dataclass(frozen=True)
class CropInfo:
    """Position of a prepared image in its native grid; needed to restore predictions.

    Args:
        grid: the native grid.
        shape: in canonical axes, before the crop.
        box: (start, stop) of the content per canonical axis.
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
        return tuple(slice(start, stop) for start, stop in self.box)

    @property
    def content_shape(self) -> tuple[int, ...]:
        """Native voxels of the content, in canonical axes."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def native_spacing_mm(self) -> tuple[float, ...]:
        """Right, anterior, superior."""
        return canonical_spacing(self.grid, self.reoriented)

    def spacing_mm(self, shape: Sequence[int]) -> tuple[float, ...]:
        """Spacing of the prepared image with this shape, one number per axis."""
        # A picture has two axes, its native grid three.
        axes = zip(self.native_spacing_mm, self.content_shape, shape, strict=False)
        return tuple(mm * native_voxels / voxels for mm, native_voxels, voxels in axes)


def content_box(image: np.ndarray) -> Box:
    """Bounding box of the voxels that are not 0 in some channel; (channels, *spatial) -> slices."""
    box: list[slice] = []
    for axis in range(1, image.ndim):
        # From both ends: a CT has content in its outermost planes, and no more of it is read.
        planes = np.moveaxis(image[:, *box], axis, 0)
        with_content = (index for index, plane in enumerate(planes) if plane.any())
        start = next(with_content, None)
        if start is None:
            return _full_box(image)
        stop = len(planes)
        while not planes[stop - 1].any():
            stop -= 1
        box.append(slice(start, stop))
    return tuple(box)


def _full_box(image: np.ndarray) -> Box:
    return tuple(slice(0, voxels) for voxels in image.shape[1:])


def preprocess(
    image: np.ndarray, grid: Grid, config: PreprocessingConfig, missing_channels: Sequence[int] = ()
) -> tuple[np.ndarray, CropInfo]:
    """Native voxels to network input.

    Shape: (channels, X, Y, Z) -> (channels, *spatial) float32, spatial being 2 or 3 axes.
    Args: missing_channels: are 0, also after normalisation.
    Raises: ValueError: a channel that cannot be normalised or resampled to finite values that differ.
    """
    canonical, spacing_mm = to_canonical(image, grid, config.reorients)
    box = content_box(canonical) if config.frame is None else _full_box(canonical)
    cropped = canonical[:, *box]
    crop_info = CropInfo(
        grid=grid,
        shape=canonical.shape[1:],
        box=tuple((axis.start, axis.stop) for axis in box),
        reoriented=config.reorients,
        # For the way back: from the target spacing to the native one.
        nearest_axis=config.nearest_axis(config.target_mm(spacing_mm), spacing_mm),
    )
    # Normalisation comes first: resampling mixes values.
    normalised = _normalise_channels(cropped, config, missing_channels)
    with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the range
        resampled = [_resample(channel, spacing_mm, config) for channel in normalised]
    # A stack copies, and a whole-body CT is 700 MB.
    prepared = resampled[0][None] if len(resampled) == 1 else np.stack(resampled)
    prepared = _drop_slice(prepared, config.image_dims)
    if config.frame is not None:
        prepared = framed(prepared, config.frame)
    prepared = prepared.astype(np.float32, copy=False)
    if np.may_share_memory(prepared, image):
        prepared = prepared.copy()
    if not np.isfinite(prepared).all():
        low = float(image.min())
        high = float(image.max())
        raise ValueError(f"values from {low:.4g} to {high:.4g} are not finite any more once resampled")
    return prepared, crop_info


def _normalise_channels(
    image: np.ndarray, config: PreprocessingConfig, missing_channels: Sequence[int]
) -> list[np.ndarray]:
    """Raises: ValueError: as `normalise`, with the channel's number."""
    mask = None
    if "zscore_nonzero" in config.normalisation:
        mask = binary_fill_holes((image != 0).any(0))
    normalised = []
    for index, channel in enumerate(image):
        # The mean of other cases' channels under `zscore` and `dataset`
        if index in missing_channels:
            normalised.append(np.zeros_like(channel))
            continue
        try:
            normalised.append(
                normalise(channel, config.normalisation[index], config.intensities[index], mask)
            )
        except ValueError as error:
            raise ValueError(f"channel {index}: {error}") from error
    return normalised


def _resample(channel: np.ndarray, spacing_mm: Sequence[float], config: PreprocessingConfig) -> np.ndarray:
    """To the size of `config.resize`, else to the target spacing."""
    if config.resize is not None:
        size = (*config.resize, 1)[: channel.ndim]  # a picture is a volume of one slice
        return zoom(channel, size, config.smooths)
    target_mm = config.target_mm(spacing_mm)
    shape = resampled_shape(channel.shape, spacing_mm, target_mm)
    if config.convention is None:
        return zoom(channel, shape, config.smooths)
    return zoom_within_range(channel, shape, config.nearest_axis(spacing_mm, target_mm))


def framed(image: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Centre crop, padded with 0 if the image is smaller: (channels, *spatial) -> (channels, *size)."""
    padding = [(0, 0)]  # of the channels
    for voxels, new_voxels in zip(image.shape[1:], size, strict=True):
        missing = max(0, new_voxels - voxels)
        padding.append((missing // 2, missing - missing // 2))
    padded = np.pad(image, padding)
    box = []
    for voxels, new_voxels in zip(padded.shape[1:], size, strict=True):
        start = (voxels - new_voxels) // 2
        box.append(slice(start, start + new_voxels))
    return np.ascontiguousarray(padded[:, *box])


def preprocess_label(
    label: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig, num_classes: int
) -> np.ndarray:
    """A native label map on the grid of its prepared image; no new values appear.

    Shape: (X, Y, Z) -> (*spatial) uint8 or int16.
    """
    canonical, spacing_mm = to_canonical(label[None], crop_info.grid, config.reorients)
    cropped = canonical[0][crop_info.slices]
    target_mm = config.target_mm(spacing_mm)
    shape = resampled_shape(cropped.shape, spacing_mm, target_mm)
    axis = config.nearest_axis(spacing_mm, target_mm)
    if axis is not None:
        cropped = cropped.take(nearest(cropped.shape[axis], shape[axis]), axis)
    resampled = zoom_label(cropped, shape)
    dtype = np.uint8 if num_classes <= 256 else np.int16
    return _drop_slice(resampled, config.image_dims).astype(dtype)


def preprocess_probabilities(
    probabilities: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig
) -> np.ndarray:
    """Native probabilities of classes on the grid of their prepared image, by linear interpolation.

    Shape: (classes, X, Y, Z) -> (classes, *spatial) float16.
    """
    canonical, spacing_mm = to_canonical(probabilities, crop_info.grid, config.reorients)
    cropped = canonical[:, *crop_info.slices]
    target_mm = config.target_mm(spacing_mm)
    shape = resampled_shape(cropped.shape[1:], spacing_mm, target_mm)
    axis = config.nearest_axis(spacing_mm, target_mm)
    if axis is not None:
        cropped = cropped.take(nearest(cropped.shape[1 + axis], shape[axis]), 1 + axis)
    resampled = np.stack([zoom_linear(of_class, shape) for of_class in cropped])
    return _drop_slice(resampled, config.image_dims).astype(np.float16)


def to_native(content: np.ndarray, crop_info: CropInfo, outside: float = 0) -> np.ndarray:
    """Values of the content, in canonical axes, on the native grid: (R, A, S) -> (X, Y, Z)."""
    full = np.full(crop_info.shape, outside, content.dtype)
    full[crop_info.slices] = content
    return from_canonical(full, crop_info.grid, crop_info.reoriented)


def resampled_shape(
    shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]
) -> tuple[int, ...]:
    """Voxels per axis after resampling to `target` mm; axes missing in `target` (a single slice) stay."""
    axes = zip(shape, spacing, target, strict=False)
    scaled = [max(1, round(voxels * mm / new_mm)) for voxels, mm, new_mm in axes]
    return (*scaled, *shape[len(target) :])


def _drop_slice(array: np.ndarray, image_dims: int) -> np.ndarray:
    return np.ascontiguousarray(array[..., 0] if image_dims == 2 else array)
