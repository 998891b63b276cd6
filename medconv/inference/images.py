"""Images that a predictor takes from Python: paths, arrays and nibabel images, as voxels on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.spatialimages import SpatialImage

from medconv.data.case import Case, Grid
from medconv.data.case_files import image_of
from medconv.data.io.grids import check_same_grid
from medconv.data.io.images import lacks_orientation
from medconv.inference.inputs import name_of
from medconv.utils.errors import ArgumentError

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
    """

    case: Case
    name: str
    voxels: np.ndarray
    grid: Grid
    is_oriented: bool = True


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
        array: (channels, X, Y, Z), or (X, Y, Z) for one channel; of 2D images without Z.
        image_dims: spatial axes of the image, 2 or 3.
        affine: (4, 4), voxel indices to mm (right, anterior, superior).
        spacing_mm: of each spatial axis; the axes point right, anterior and superior.
    Raises:
        ArgumentError: neither or both of affine and spacing_mm, or one that is no such thing.
        ValueError: an array of another shape, or not of real numbers.
    """
    axes = "XYZ"[:image_dims]
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
    if len(spacing) != image_dims or not all(0 < mm < np.inf for mm in spacing):
        raise ArgumentError("spacing_mm", f" must be {image_dims} positive numbers, got {list(spacing_mm)}")
    # The thickness of a 2D image is not known.
    across = [1.0] * (3 - image_dims)
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
