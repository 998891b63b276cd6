"""An image as the networks take it: checked against what they were trained on, and preprocessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from medconv.data.case import Case
from medconv.data.io.grids import canonical_spacing
from medconv.data.io.images import UNORIENTED
from medconv.data.preprocessing.preprocess import (
    CropInfo,
    PreprocessingConfig,
    preprocess_image,
    resampled_shape,
)
from medconv.inference.images import NamedImage
from medconv.inference.load import LoadedModel
from medconv.planning.spacing import MUCH_LOST
from medconv.planning.topology import rounded_up
from medconv.utils.logging import size_text

# Degrees, as in training's checks.
_MAX_SHEAR = 0.5
# A spacing this many times below or above that of all training cases causes a warning.
_FAR = 2.0
# Mean over axes of how many times longer or shorter voxels are than all of training; then the header is
# wrong, such as metres for millimetres. Resampling by 100 along each axis makes a million voxels of one.
_WRONG = 4.0


@dataclass(frozen=True)
class Input:
    """A case as the networks take it.

    Args:
        arrays: (channels, *spatial) float32, one per preprocessing.
        crops: where these lie in the image, one per preprocessing; they differ in `nearest_axis` alone.
        warning: unusual properties; None: there are none.
    """

    case: Case
    arrays: list[np.ndarray]
    crops: list[CropInfo]
    warning: str | None = None

    @property
    def crop(self) -> CropInfo:
        return self.crops[0]


def prepare(
    image: NamedImage, members: Sequence[LoadedModel], preprocessings: Sequence[PreprocessingConfig]
) -> Input:
    """Check and preprocess an image.

    Args:
        members: the networks that will see it.
        preprocessings: the different ones of the members.
    Raises:
        ValueError: the image does not fit the networks.
    """
    _check_image(image, members[0])
    _check_missing(image, members)
    for member in members:
        _check_spacing(image, member)
    arrays: list[np.ndarray] = []
    crops: list[CropInfo] = []
    for preprocessing in preprocessings:
        try:
            array, crop = preprocess_image(
                image.voxels, image.grid, preprocessing, image.case.missing_channels
            )
        except ValueError as error:
            raise ValueError(f"{image.name}: {error}") from error
        arrays.append(array)
        crops.append(crop)
    _check_common_grid(image, crops)
    for member in members:
        if not member.targets.per_voxel:
            array = arrays[preprocessings.index(member.preprocessing)]
            _check_size(image, member, array.shape[1:], crops[0])
    warnings = _warnings(image, members, crops[0])
    return Input(image.case, arrays, crops, "; ".join(warnings) or None)


def _check_image(image: NamedImage, model: LoadedModel) -> None:
    preprocessing = model.preprocessing
    num_channels = len(image.voxels)
    if num_channels != len(model.modalities):
        expected = f"{len(model.modalities)} channels ({', '.join(model.modalities)})"
        advice = ""
        if model.takes_missing:
            advice = "; name channels CASE_0000, CASE_0001, ..., or list a missing one as null in a .json"
        raise ValueError(f"{image.name}: the network was trained on {expected}, found {num_channels}{advice}")
    shape = image.grid.shape
    is_3d = preprocessing.image_dims == 3
    if min(shape) == 1 if is_3d else shape[2] > 1:
        dims = f"{preprocessing.spatial_dims}D"
        if preprocessing.slice_axis is not None:
            dims += " on slices of volumes"
        expected = "several slices along each axis" if is_3d else "one slice, along the third axis"
        raise ValueError(
            f"{image.name}: the network is {dims}, the image has shape {shape}; expected {expected}"
        )
    if not np.isfinite(image.voxels).all():
        raise ValueError(f"{image.name}: has voxels that are NaN or infinite, expected finite numbers")


def _check_missing(image: NamedImage, members: Sequence[LoadedModel]) -> None:
    if not image.case.missing_channels:
        return
    for member in members:
        if not member.takes_missing:
            names = ", ".join(member.modalities[channel] for channel in image.case.missing_channels)
            raise ValueError(
                f"{image.name}: {names} is missing, and {member.path} was not trained with data.missing=allow"
            )


def _check_spacing(image: NamedImage, model: LoadedModel) -> None:
    """Check that a header does not make an image huge or tiny; a spacing that somebody stated is used.

    Raises:
        ValueError: voxels far larger or smaller than in all training cases.
    """
    spacing_mm = canonical_spacing(image.grid, model.preprocessing.reorients)
    if image.case.source_spacing_mm is not None or is_plausible(spacing_mm, model):
        return
    ranges = model.spacing_range_mm
    shape = size_text(image.grid.shape)
    actual = size_text(spacing_mm[: len(ranges)], 3)
    trained = _range_text(ranges)
    raise ValueError(
        f"{image.name}: {shape} voxels of {actual} mm (right, anterior, superior), but of {trained} mm in "
        "training; correct the header, or state the spacing by source_spacing_mm"
    )


def is_plausible(spacing_mm: Sequence[float], model: LoadedModel) -> bool:
    """Whether voxels are not far larger or smaller than in all training cases; or their size changes nothing.

    Args:
        spacing_mm: right, anterior, superior.
    """
    ranges = model.spacing_range_mm
    if not ranges or model.preprocessing.resize is not None:
        return True
    voxel = prod(spacing_mm[: len(ranges)])
    smallest = prod(low for low, _ in ranges)
    largest = prod(high for _, high in ranges)
    times: float = _WRONG ** len(ranges)
    return smallest / times <= voxel <= largest * times


def _range_text(ranges: Sequence[tuple[float, float]]) -> str:
    return " x ".join(f"{low:.3g} to {high:.3g}" for low, high in ranges)


def _check_common_grid(image: NamedImage, crops: Sequence[CropInfo]) -> None:
    """Only `data.convention` makes a difference."""
    boxes = [replace(crop, nearest_axis=None) for crop in crops]
    if any(box != boxes[0] for box in boxes):
        raise ValueError(
            f"{image.name}: networks of different conventions have no common grid for this image; "
            "predict with each alone"
        )


def _check_size(image: NamedImage, model: LoadedModel, prepared: Sequence[int], crop: CropInfo) -> None:
    """Check the size for an image-level network, which takes images of one size.

    Raises:
        ValueError: another size; or a 2D image of another size than all training images, so that the network
            would see only its middle, or padding around it.
    """
    if tuple(prepared) != model.window.patch_size:
        raise ValueError(
            f"{image.name}: {size_text(prepared)} voxels after preprocessing, the network was trained on "
            f"images of {size_text(model.window.patch_size)}"
        )
    preprocessing = model.preprocessing
    spacing_mm = crop.native_spacing_mm
    # With several spacings, images are resampled, and scans of one native size get several sizes.
    has_training_spacing = all(
        low == mm == high for mm, (low, high) in zip(spacing_mm, model.spacing_range_mm, strict=False)
    )
    if not model.rounding or not has_training_spacing or preprocessing.frame is None:
        return
    size = resampled_shape(crop.shape[:2], spacing_mm[:2], preprocessing.spacing_mm)
    if rounded_up(size, model.rounding) != preprocessing.frame:
        native = crop.shape[:2]
        largest = resampled_shape(preprocessing.frame, preprocessing.spacing_mm, spacing_mm)
        raise ValueError(
            f"{image.name}: {size_text(native)} pixels, the network was trained on images of one size and "
            f"takes up to {size_text(largest)}; resize the image, or train with resizing"
        )


def _warnings(image: NamedImage, members: Sequence[LoadedModel], crop: CropInfo) -> list[str]:
    warnings: list[str] = []
    spacing_warning = _spacing_warning(crop.native_spacing_mm, members)
    if spacing_warning:
        warnings.append(spacing_warning)
    cut_warning = _cut_warning(crop, members)
    if cut_warning:
        warnings.append(cut_warning)
    shear = image.grid.shear
    if shear > _MAX_SHEAR:
        warnings.append(f"its axes are {shear:.1f} degrees off a right angle; it is used as it is")
    if not image.is_oriented:
        warnings.append(UNORIENTED)
    return warnings


def _cut_warning(crop: CropInfo, members: Sequence[LoadedModel]) -> str | None:
    """Of an image of which a network sees far from all."""
    for preprocessing in (member.preprocessing for member in members):
        frame = preprocessing.frame
        if frame is None or preprocessing.resize is not None:
            continue
        size = resampled_shape(crop.shape, crop.native_spacing_mm, preprocessing.spacing_mm)[: len(frame)]
        lost = max(1 - seen / edge for seen, edge in zip(frame, size, strict=True))
        if lost > MUCH_LOST:
            seen_of_all = f"{size_text(frame)} of {size_text(size)} voxels"
            return f"the network sees only its middle, {seen_of_all} on the network's grid"
    return None


def _spacing_warning(spacing_mm: Sequence[float], members: Sequence[LoadedModel]) -> str | None:
    for member in members:
        ranges = member.spacing_range_mm
        far = [
            mm * _FAR < low or mm > _FAR * high for mm, (low, high) in zip(spacing_mm, ranges, strict=False)
        ]
        if any(far):
            actual = size_text(spacing_mm[: len(ranges)], 3)
            return (
                f"its spacing, {actual} mm (right, anterior, superior), is far from that of training, "
                f"{_range_text(ranges)} mm"
            )
    return None
