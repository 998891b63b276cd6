"""From native voxels to network input, and back: orientation, crop, spacing, normalisation.

Preparation, validation and prediction all use these functions, so they cannot differ. The way back takes a
slab of planes at a time: of 105 classes on 512 x 512 x 700 voxels all planes would be 77 GB, and those of the
prepared grid still 14.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from scipy.ndimage import binary_fill_holes, find_objects
from torch import Tensor
from torch.nn import functional as F

from medconv.data.case import Case, Grid
from medconv.data.case_files import image_of, label_on
from medconv.data.io.grids import canonical_spacing, from_canonical, to_canonical
from medconv.data.preprocessing.normalisation import check_normalisation, normalise
from medconv.data.preprocessing.resampling import (
    nearest,
    nearest_axis,
    neighbours,
    zoom,
    zoom_label,
    zoom_within_range,
)
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError

CONVENTIONS = (None, "nnunet", "nnunet_ras")
# How a single slice lies, whatever its format: its axes are those that it has as a slice of a volume.
SINGLE_SLICES = "as slices of volumes"
Box = tuple[slice, ...]
_VOXELS = 2**20  # of a slab on the native grid; 4 MiB for each array of one channel
_LOCATIONS = 5_000  # foreground voxels kept per class and case
NOTHING = np.empty(0, np.float32)


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
        single_slices: `SINGLE_SLICES`, for networks that take them; earlier checkpoints lack it.
    """

    spatial_dims: int
    spacing_mm: tuple[float, ...]
    normalisation: tuple[str, ...]
    intensities: tuple[dict[str, float], ...]
    slice_axis: int | None = None
    frame: tuple[int, ...] | None = None
    resize: tuple[int, ...] | None = None
    convention: str | None = None
    single_slices: str = SINGLE_SLICES

    def __post_init__(self) -> None:
        check_normalisation(self.normalisation)
        are_positive = all(mm > 0 for mm in self.spacing_mm)
        if len(self.spacing_mm) != self.spatial_dims or not are_positive:
            raise ArgumentError(
                "spacing_mm", f" needs {self.spatial_dims} positive numbers in mm, got {self.spacing_mm}"
            )
        if self.convention not in CONVENTIONS:
            raise ArgumentError("convention", f" must be nnunet, nnunet_ras or None, got {self.convention}")
        if self.single_slices != SINGLE_SLICES:
            raise ArgumentError("single_slices", f" must be {SINGLE_SLICES}, got {self.single_slices}")

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

    def spacing_mm(self, shape: Sequence[int]) -> tuple[float, ...]:
        """Spacing of the prepared image with this shape, one number per axis."""
        # A picture has two axes, its native grid three.
        native_mm = canonical_spacing(self.grid, self.reoriented)
        axes = zip(native_mm, self.content_shape, shape, strict=False)
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


def all_finite(image: np.ndarray) -> bool:
    """Plane by plane, since the answers for a whole CT are 80 MB. Shape: (channels, *spatial)."""
    return all(np.isfinite(plane).all() for channel in image for plane in channel)


def preprocess_image(
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
    mask = None
    if "zscore_nonzero" in config.normalisation:
        mask = binary_fill_holes((cropped != 0).any(0))
    resampled = []
    for index, channel in enumerate(cropped):
        # 0 is the mean of other cases' channels under `zscore` and `dataset`
        normalised = np.zeros_like(channel) if index in missing_channels else channel
        try:
            if index not in missing_channels:
                normalised = normalise(channel, config.normalisation[index], config.intensities[index], mask)
        except ValueError as error:
            raise ValueError(f"channel {index}: {error}") from error
        # Normalisation comes first: resampling mixes values.
        resampled.append(_resample(normalised, spacing_mm, config))
    # A stack copies, and a whole-body CT is 700 MB.
    prepared = resampled[0][None] if len(resampled) == 1 else np.stack(resampled)
    if config.image_dims == 2:  # a picture is a volume of one slice
        prepared = prepared[..., 0]
    prepared = np.ascontiguousarray(prepared)
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


def _resample(channel: np.ndarray, spacing_mm: Sequence[float], config: PreprocessingConfig) -> np.ndarray:
    """To the size of `config.resize`, else to the target spacing; values may become infinite."""
    target_mm = config.target_mm(spacing_mm)
    shape = resampled_shape(channel.shape, spacing_mm, target_mm)
    if config.resize is not None:
        shape = (*config.resize, 1)[: channel.ndim]  # a picture is a volume of one slice
    with np.errstate(over="ignore", invalid="ignore"):
        if config.convention is None or config.resize is not None:
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
    label: np.ndarray,
    crop_info: CropInfo,
    config: PreprocessingConfig,
    num_classes: int,
    draw: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """A native label map on the grid of its prepared image; no new values appear.

    Shape: (X, Y, Z) -> (*spatial) uint8 or int16.
    Args:
        draw: from label values to classes, some of which are a voxel wide. They are drawn where they stay as
            wide: along each axis on the coarser one of both grids.
    """
    canonical, spacing_mm = to_canonical(label[None], crop_info.grid, config.reorients)
    cropped = canonical[0][crop_info.slices]
    target_mm = config.target_mm(spacing_mm)
    shape = resampled_shape(cropped.shape, spacing_mm, target_mm)
    axis = config.nearest_axis(spacing_mm, target_mm)
    if draw is not None:
        coarser = np.minimum(cropped.shape, shape).tolist()
        cropped = draw(_zoomed(cropped, coarser, axis))
    resampled = _zoomed(cropped, shape, axis)
    if config.image_dims == 2:
        resampled = resampled[..., 0]
    return np.ascontiguousarray(resampled, np.uint8 if num_classes <= 256 else np.int16)


def _zoomed(label: np.ndarray, shape: Sequence[int], nearest_axis: int | None) -> np.ndarray:
    """A label map of another shape. Args: nearest_axis: along which it takes the nearest plane."""
    if nearest_axis is not None:
        planes = nearest(label.shape[nearest_axis], shape[nearest_axis])
        label = label.take(planes, nearest_axis)
    return zoom_label(label, shape)


@dataclass(frozen=True)
class Entry:
    """One prepared case; the arrays are read-only memory maps, or `CompressedArray`s, which read alike.

    Shape: image (channels, *spatial) float32; label (*spatial); foreground (voxels, 1 + spatial axes): class
    and position of some thousand voxels per class; with a value to ignore, class 0 is any labelled voxel;
    soft_label (classes, *spatial) float16, the probabilities whose most probable class is `label`, or what
    `Family.labels` prepares, float16 or float32.
    For image-level targets, label and foreground are `NOTHING`, which is not written; so is `soft_label`
    where labels are label maps.
    """

    image: np.ndarray
    label: np.ndarray
    foreground: np.ndarray
    crop_info: CropInfo
    soft_label: np.ndarray = field(default_factory=lambda: NOTHING)

    @property
    def training_label(self) -> np.ndarray:
        """What the loss is computed from: (1, *spatial), or of probabilities (classes, *spatial)."""
        return self.soft_label if self.soft_label.size else self.label[None]


def preprocess_case(
    case: Case, config: PreprocessingConfig, num_classes: int, targets: Targets | None = None
) -> Entry:
    """One case from its files to an entry of the store.

    Args:
        targets: None: label maps as they are, without a value to ignore.
    Raises:
        ValueError: files that were replaced after the check and are now invalid.
    """
    native, grid = image_of(case)
    ignore = targets.ignore if targets else None  # the label value of unlabelled voxels
    own_labels = targets and targets.family.own("labels")
    draw = None
    if isinstance(targets, SegmentationTargets) and targets.draws_classes:
        draw = targets.learned_label
    highest_label = -1
    if case.label is not None and not own_labels:
        native_label = label_on(case, grid)
        labelled = native_label if ignore is None else native_label[native_label != ignore]
        highest_label = labelled.max(initial=0) if draw is None else -1
    if not all_finite(native) or highest_label >= num_classes:
        raise ValueError(
            f"case {case.id}: its files were replaced after the check, and are invalid; start again"
        )
    try:
        image, crop_info = preprocess_image(native, grid, config, case.missing_channels)
    except ValueError as error:
        raise ValueError(f"case {case.id}: {case.images[0]}: {error}") from error
    if case.label is None:
        return Entry(image, NOTHING, NOTHING, crop_info)
    if own_labels:
        label, soft_label = own_labels.prepared(targets, case, native, crop_info, config)
        return Entry(image, label, _foreground(label, num_classes, ignore), crop_info, soft_label)
    num_values = max(num_classes, 1 + (ignore or 0))
    label = preprocess_label(native_label, crop_info, config, num_values, draw)
    return Entry(image, label, _foreground(label, num_classes, ignore), crop_info)


def _foreground(label: np.ndarray, num_classes: int, ignore: int | None) -> np.ndarray:
    """(voxels, 1 + axes) int32: class and position, spread evenly over each class, at most `_LOCATIONS` each.

    If there is a value to ignore, class 0 means all labelled voxels of any class.
    """
    # Each class in its bounding box: a hundred passes over a CT would take seconds.
    boxes = dict(enumerate(find_objects(label, max_label=num_classes - 1), start=1))
    if ignore is not None:
        boxes = {0: tuple(slice(0, voxels) for voxels in label.shape), **boxes}
    rows = [np.empty((0, 1 + label.ndim), np.int32)]
    for label_value, box in boxes.items():
        if box is None:
            continue
        mask = label[box] == label_value if label_value else label != ignore
        indices = np.flatnonzero(mask)
        count = min(len(indices), _LOCATIONS)
        evenly = np.linspace(0, len(indices) - 1, count).astype(np.int64)
        positions = np.column_stack(np.unravel_index(indices[evenly], mask.shape))
        positions += [axis.start for axis in box]
        label_values = np.full(len(positions), label_value)
        rows.append(np.column_stack([label_values, positions]).astype(np.int32))
    return np.concatenate(rows)


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


@dataclass(frozen=True)
class Slab:
    """Neighbouring planes of the content.

    Args:
        first, stop: the planes.
        sources: the planes of a prediction that they are interpolated between, and those since the slab
            before.
    """

    first: int
    stop: int
    sources: slice


class SlabGrid:
    """The slabs of an image, and how a prediction gets there.

    Args:
        crop_info: of the image.
        axis: of the planes, in canonical axes.
        source_length: planes of the prediction.
    Attributes:
        in_plane: native voxels of a plane of the content.
    """

    def __init__(self, crop_info: CropInfo, axis: int, source_length: int) -> None:
        self.crop_info = crop_info
        self.axis = axis
        self.source_length = source_length
        shape = crop_info.content_shape
        self.in_plane = (*shape[:axis], *shape[axis + 1 :])
        self._length = shape[axis]
        # The planes of the prediction below and above each plane, and the weight of the one above
        self._lower, self._upper, self._upper_weight = neighbours(source_length, self._length)
        if crop_info.nearest_axis == axis:
            self._lower = nearest(source_length, self._length)
            self._upper = self._lower
            self._upper_weight = np.zeros(self._length, np.float32)

    def slabs(self) -> list[Slab]:
        """The slabs of the content, in order; their sources leave out no plane of the prediction."""
        planes = max(1, _VOXELS // prod(self.in_plane))
        slabs: list[Slab] = []
        source_stop = 0
        for first in range(0, self._length, planes):
            stop = min(first + planes, self._length)
            source_first = min(int(self._lower[first]), source_stop)
            is_last = stop == self._length
            source_stop = self.source_length if is_last else int(self._upper[stop - 1]) + 1
            slabs.append(Slab(first, stop, slice(source_first, source_stop)))
        return slabs

    @property
    def planes_at_once(self) -> int:
        """Planes of a prediction that a slab needs, at most."""
        planes: list[int] = [slab.sources.stop - slab.sources.start for slab in self.slabs()]
        return max(planes)

    def channels(self, logits: Sequence[Tensor] | Tensor, slab: Slab) -> Iterator[Tensor]:
        """One channel of the slab after the other.

        Shape: logits (outputs, planes of `slab.sources`, *in_plane) -> each (planes of the slab, *in_plane),
            float32. A picture has one axis in its planes there, and two here.
        """
        device = logits[0].device
        rows = slice(slab.first, slab.stop)
        from_lower = torch.from_numpy(self._lower[rows] - slab.sources.start).to(device)
        from_upper = torch.from_numpy(self._upper[rows] - slab.sources.start).to(device)
        upper_share = torch.from_numpy(self._upper_weight[rows]).to(device)[:, None, None]
        is_interpolated = bool(self._upper_weight[rows].any())
        nearest_axis = self.crop_info.nearest_axis
        for channel in logits:
            missing_axes = 3 - channel.ndim  # a picture is a volume of one slice
            source = channel.float().reshape(*channel.shape, *(1,) * missing_axes)
            planes = source.index_select(0, from_lower)
            if is_interpolated:
                planes = planes.lerp_(source.index_select(0, from_upper), upper_share)
            if nearest_axis is not None and nearest_axis != self.axis:
                # Counted in the planes, the axis before which the planes' own one is missing.
                in_plane_axis = nearest_axis if nearest_axis < self.axis else nearest_axis - 1
                chosen = nearest(planes.shape[1 + in_plane_axis], self.in_plane[in_plane_axis])
                planes = planes.index_select(1 + in_plane_axis, torch.from_numpy(chosen).to(device))
            if tuple(planes.shape[1:]) != self.in_plane:
                resized = F.interpolate(
                    planes[:, None], size=self.in_plane, mode="bilinear", align_corners=False
                )
                planes = resized[:, 0]
            yield planes
