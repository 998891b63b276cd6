"""An image as the networks take it: checked against what they were trained on, and preprocessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.spatialimages import SpatialImage

from medconv.data.case import MAX_SHEAR, Case, Grid
from medconv.data.case_files import image_of
from medconv.data.io import nifti
from medconv.data.io.grids import canonical_spacing, check_same_grid
from medconv.data.io.images import UNORIENTED, channel_doubts, lacks_orientation
from medconv.data.io.raster import PIXEL_MM, is_picture
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, all_finite, preprocess_image
from medconv.data.preprocessing.value_bands import ADAPTING, advice, percentiles, row_text
from medconv.inference.inputs import name_of
from medconv.inference.load import LoadedModel
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import size_text

# Volume of a voxel over that of a box with its edges; below this the axes lie in one plane.
_SINGULAR = 1e-6
# What a predictor takes for an image.
ImageLike = str | Path | np.ndarray | SpatialImage


@dataclass(frozen=True)
class NamedImage:
    """All channels of a case.

    Args:
        case: its id and, if it was read from files, these.
        name: for messages: the first file, or what stands for it.
        voxels: (channels, X, Y, Z) float32; a 2D image has Z = 1.
        grid: of the voxels.
        is_oriented: whether it says where left and right are.
        has_header: whether its spacing is a header's, which somebody may have corrected for others.
        own_grid: that of its header, where `grid` has another spacing, which was stated.
    """

    case: Case
    name: str
    voxels: np.ndarray
    grid: Grid
    is_oriented: bool = True
    has_header: bool = True
    own_grid: Grid | None = None


def from_files(case: Case) -> NamedImage:
    """Read the images of a case. Raises: ValueError: as `read_image`."""
    voxels, grid = image_of(case)
    is_oriented = not any(map(lacks_orientation, case.images))
    return NamedImage(case, str(case.images[0]), voxels, grid, is_oriented)


def from_array(
    array: np.ndarray,
    image_dims: int,
    affine: np.ndarray | None = None,
    spacing_mm: Sequence[float] | None = None,
) -> NamedImage:
    """An image from an array, with either an affine or the spacing of each axis.

    Args:
        array: (channels, X, Y, Z), or (X, Y, Z) for one channel; a 2D image has no Z, or Z = 1.
        image_dims: spatial axes of the image, 2 or 3.
        affine: (4, 4), voxel indices to mm (right, anterior, superior).
        spacing_mm: of each spatial axis, and maybe a 2D image's thickness; the axes point right, anterior
            and superior.
    Raises:
        ArgumentError: neither or both of affine and spacing_mm, or one that is no such thing.
        ValueError: an array of another shape, or not of real numbers.
    """
    axes = "XYZ"[:image_dims]
    if image_dims == 2 and array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]  # as files of 2D images have it
    if array.ndim not in (image_dims, image_dims + 1) or array.size == 0:
        shape = ", ".join(axes)
        raise ValueError(f"an array must be ({shape}) or (channels, {shape}), got shape {array.shape}")
    if array.ndim == image_dims:
        array = array[None]
    if image_dims == 2:
        # Z = 1, as files of 2D images have.
        array = array[..., None]
    if (affine is None) == (spacing_mm is None):
        number = "neither" if affine is None else "both"
        raise ArgumentError("affine", f" or spacing_mm is needed for an array, got {number}")
    if spacing_mm is not None:
        affine = _affine_of(spacing_mm, image_dims)
    grid = _grid("affine", array.shape[1:], affine)
    return NamedImage(Case("array", ()), "the array", _real("the array", array), grid)


def from_nibabel(images: Sequence[SpatialImage]) -> NamedImage:
    """An image from nibabel images: one per channel, or one with the channels along its fourth axis.

    Raises:
        ValueError: a shape of other than 2 to 4 axes, not real numbers, without an affine, or channels on
            different grids.
    """
    names: list[str] = []
    channels: list[np.ndarray] = []
    grids: list[Grid] = []
    for number, image in enumerate(images, 1):
        name = _name(image, number)
        names.append(name)
        if not 2 <= len(image.shape) <= 4:
            raise ValueError(f"{name}: expected 2, 3 or 4 axes, got shape {image.shape}")
        nifti.check_spacing(image, name)
        grid = _grid(f"{name}: its affine", image.shape, image.affine)
        grids.append(grid)
        check_same_grid(Path(names[0]), grids[0], Path(name), grid)
        array = _real(name, np.asanyarray(image.dataobj)).reshape(*grid.shape, -1)
        # NIfTI has the channels last.
        channels += list(np.moveaxis(array, -1, 0))
    return NamedImage(
        case=Case(name_of(Path(names[0])), ()),
        name=names[0],
        voxels=np.stack(channels),
        grid=grids[0],
        is_oriented=all(map(_is_oriented, images)),
    )


def _name(image: SpatialImage, number: int) -> str:
    return image.get_filename() or f"image {number}"


def _is_oriented(image: SpatialImage) -> bool:
    if not isinstance(image, nib.Nifti1Pair):
        return True
    # In memory, an affine is set without a code as often as with one: only a file says that it has none.
    codes = image.header["sform_code"] or image.header["qform_code"]
    return bool(codes) or image.get_filename() is None


def _affine_of(spacing_mm: Sequence[float], image_dims: int) -> np.ndarray:
    spacing = [float(mm) for mm in spacing_mm]
    if len(spacing) not in (image_dims, 3) or not all(0 < mm < np.inf for mm in spacing):
        raise ArgumentError("spacing_mm", f" must be {image_dims} positive numbers, got {list(spacing_mm)}")
    across = [1.0] * (3 - len(spacing))  # the thickness of a 2D image is mostly not known
    return np.diag([*spacing, *across, 1.0])


def _grid(name: str, shape: Sequence[int], affine: Any) -> Grid:
    if affine is None:
        raise ValueError(f"{name} is missing, so the voxels have no place in the patient")
    if np.shape(affine) != (4, 4):
        raise ValueError(f"{name} must have shape (4, 4), got {np.shape(affine)}")
    grid = Grid.of(shape, np.asarray(affine))
    is_finite = bool(np.isfinite(grid.matrix).all())
    if not is_finite or grid.voxel_mm3 <= _SINGULAR * np.prod(grid.spacing_mm):
        raise ValueError(f"{name} is singular, so it has no spacing: {grid.affine}")
    return grid


def _real(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{name}: expected voxels that are real numbers, got {array.dtype}")
    return array.astype(np.float32)


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
        kept: of the image, by `Family.keeps`.
        own_grid: as of `NamedImage`.
    """

    case: Case
    arrays: list[np.ndarray]
    crops: list[CropInfo]
    warning: str | None = None
    kept: Any = None
    own_grid: Grid | None = None


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
    _check_image(image, members)
    # In each way that some network needs.
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
    # Only `data.convention` makes a difference.
    boxes = [replace(crop, nearest_axis=None) for crop in crops[1:]]
    if any(box != replace(crops[0], nearest_axis=None) for box in boxes):
        raise ValueError(
            f"{image.name}: networks of different conventions have no common grid for this image; "
            "predict with each alone"
        )
    targets = members[0].targets
    warnings = _warnings(image, members, crops[0])
    check_prepared = targets.family.own("check_prepared")
    if check_prepared:
        for member in members:
            array = arrays[preprocessings.index(member.preprocessing)]
            doubts = check_prepared(image, member, array.shape[1:], crops[0])
            warnings += [doubt for doubt in doubts if doubt not in warnings]
    keeps = targets.family.own("keeps")
    kept = keeps and keeps(targets, image)
    return Input(image.case, arrays, crops, "; ".join(warnings) or None, kept, image.own_grid)


def _check_image(image: NamedImage, members: Sequence[LoadedModel]) -> None:
    """Raises: ValueError: another number of channels or axes than in training, or voxels of another size."""
    model = members[0]
    num_channels = len(image.voxels)
    if num_channels != len(model.modalities):
        several = "s" * (len(model.modalities) > 1)
        expected = f"{len(model.modalities)} channel{several} ({', '.join(model.modalities)})"
        advice = ""
        if model.takes_missing:
            advice = "; name channels CASE_0000, CASE_0001, ..., or list a missing one as null in a .json"
        elif num_channels > len(model.modalities) and len(image.case.images) == 1:
            is_picture = image.grid.shape[2] == 1
            axis = "; the fourth axis of a volume has channels, not times"
            advice = "; save a colour picture in grey" if is_picture else axis
        raise ValueError(f"{image.name}: the network was trained on {expected}, found {num_channels}{advice}")
    shape = image.grid.shape
    # A 2D image is a volume of one slice.
    is_3d = model.preprocessing.image_dims == 3
    if min(shape) == 1 if is_3d else shape[2] > 1:
        dims = f"{model.preprocessing.spatial_dims}D"
        if model.preprocessing.slice_axis is not None:
            dims += " on slices of volumes"
        expected = "several slices along each axis" if is_3d else "one slice, along the third axis"
        raise ValueError(
            f"{image.name}: the network is {dims}, the image has shape {shape}; expected {expected}"
        )
    if not all_finite(image.voxels):
        raise ValueError(f"{image.name}: has voxels that are NaN or infinite, expected finite numbers")
    for member in members:
        # A header must not make an image huge or tiny; a spacing that somebody stated is used.
        spacing_mm = canonical_spacing(image.grid, member.preprocessing.reorients)
        if image.case.source_spacing_mm is None and not is_plausible(spacing_mm, member):
            ranges = member.spacing_range_mm
            raise ValueError(
                f"{image.name}: {size_text(shape)} voxels of {size_text(spacing_mm[: len(ranges)], 3)} mm "
                f"(right, anterior, superior), but of {_range_text(ranges)} mm in training; correct the "
                "header, or state the spacing by source_spacing_mm"
            )


def check_channels(case: Case, members: Sequence[LoadedModel]) -> None:
    """Raises: ValueError: a channel is missing that a network needs."""
    for member in members:
        if case.missing_channels and not member.takes_missing:
            names = ", ".join(member.modalities[channel] for channel in case.missing_channels)
            raise ValueError(
                f"{case.images[0]}: {names} is missing, and {member.path} was not trained with "
                "data.missing=allow"
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


def _warnings(image: NamedImage, members: Sequence[LoadedModel], crop: CropInfo) -> list[str]:
    """What is unusual of an image that is used nevertheless."""
    warnings: list[str] = []
    missing = image.case.missing_channels
    present = [channel for number, channel in enumerate(image.voxels) if number not in missing]
    if any(channel.min() == channel.max() for channel in present):
        warnings.append("a channel is constant")
    warnings += _value_warnings(image, members)
    # Voxels of far another size than in training.
    spacing_mm = canonical_spacing(crop.grid, crop.reoriented)
    for member in members:
        ranges = member.spacing_range_mm
        pairs = list(zip(spacing_mm, ranges, strict=False))
        if any(mm * _FAR < low or mm > _FAR * high for mm, (low, high) in pairs):
            warnings.append(
                f"its spacing, {size_text(spacing_mm[: len(ranges)], 3)} mm (right, anterior, superior), is "
                f"far from that of training, {_range_text(ranges)} mm"
            )
            break
    shear = image.grid.shear
    if shear > MAX_SHEAR:
        warnings.append(f"its axes are {shear:.1f} degrees off a right angle; it is used as it is")
    if not image.is_oriented:
        warnings.append(UNORIENTED)
    stated_of_some = isinstance(members[0].source_spacing_mm, Mapping)
    if image.has_header and stated_of_some and image.case.source_spacing_mm is None:
        warnings.append("its spacing is its header's, but training set source_spacing_mm for some cases")
    if len(image.case.images) > 1:
        warnings += channel_doubts(image.case.images)
    if members[0].preprocessing.image_dims == 2 and members[0].preprocessing.resize is None:
        warnings += _pixel_warnings(image, members[0])
    return warnings


def _value_warnings(image: NamedImage, members: Sequence[LoadedModel]) -> list[str]:
    """Warnings of an image whose values are far from those of all training cases."""
    warnings: dict[str, None] = {}  # members of one data set say the same
    rows = percentiles(image.voxels, image.case.missing_channels)
    for member in members:
        channels = zip(
            rows, member.value_bands, member.preprocessing.normalisation, member.modalities, strict=False
        )
        for row, band, normalisation, name in channels:
            if band is None or normalisation in ADAPTING or not band.far(row):
                continue
            of_channel = f" of {name}" if len(member.modalities) > 1 else ""
            warning = f"most values{of_channel} are from {row_text(row)}, in training from {band.text()}"
            warnings[f"{warning}; {advice(normalisation)}"] = None
    return list(warnings)


def _pixel_warnings(image: NamedImage, model: LoadedModel) -> Iterator[str]:
    """Where the network was trained on pictures and the image is none, or the other way round."""
    are_pictures = bool(image.case.images) and all(map(is_picture, image.case.images))
    stated_mm = image.case.source_spacing_mm
    if model.takes_pixels and stated_mm == PIXEL_MM and not are_pictures and image.has_header:
        yield (
            "its pixels are used as they are, whatever their size in mm: the network was trained on pictures "
            "(PNG, JPEG), which have none"
        )
    if are_pictures and not model.takes_pixels and stated_mm is None:
        yield "a picture does not say how large its pixels are, so 1 mm is used; source_spacing_mm states it"
