"""Writing of results: NIfTI on the grid of the source image, or PNG for pictures."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.nifti1 import Nifti1Image
from nibabel.nifti2 import Nifti2Image
from nibabel.openers import ImageOpener

from medconv.data.case import Grid
from medconv.data.io import raster
from medconv.data.io.images import format_of, nifti_image, shape_and_affine
from medconv.targets.base import HIGHEST
from medconv.utils.atomic_io import replacing

_MAX_SHEAR_OF_QFORM = 0.01  # degrees; a qform has no shear
_LONGEST_OF_NIFTI_1 = 2**15 - 1  # voxels along an axis


def write_label(path: Path, label: np.ndarray, like: Path) -> None:
    """Write a label map atomically: a picture if the path ends in .png, else by the format of its suffix.

    NIfTI gets affine and header of the image `like`; if that has another format, sform and qform are set from
    its grid.

    Shape: label (X, Y, Z).

    Args:
        path: an existing file is replaced.
        like: the image that the label map belongs to.

    Raises:
        OSError: no space left, or no permission.
        ValueError: more values than a label map holds.
    """
    highest = label.max(initial=0)
    if highest > HIGHEST:
        raise ValueError(
            f"{path.name}: {highest} objects are predicted, but a label map holds {HIGHEST} values"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial:  # an existing file counts as done
        if raster.is_picture(path):
            raster.write_mask(partial, label)
            return
        source = _template(like)
        dtype = np.uint8 if highest < 256 else np.int16
        array = label.reshape(source.shape[:3]).astype(dtype)
        write = format_of(path).write
        if write is not None:
            write(partial, array, source.affine)
            return
        image = type(source)(array, source.affine, _header_like(source, dtype))
        nib.save(image, partial)


def write_image(path: Path, image: np.ndarray, like: Path) -> None:
    """Write an image of any numbers as float32 NIfTI, atomically; otherwise as `write_label`.

    Shape: image (X, Y, Z).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    source = _template(like)
    array = image.reshape(source.shape[:3]).astype(np.float32)
    with replacing(path, durable=True) as partial:
        nib.save(type(source)(array, source.affine, _header_like(source, np.float32)), partial)


def write_channels(path: Path, channels: Iterable[np.ndarray], count: int, like: Path) -> None:
    """Write volumes as one 4D float32 NIfTI, one at a time as the iterator gives them.

    Shape: `count` times (X, Y, Z); a 2D image also becomes 4D, with Z = 1.

    Args:
        path: an existing file is replaced, atomically.
        channels: the volumes; only one is in memory at a time.

    Raises:
        OSError: no space left, or no permission.
        ValueError: fewer or more volumes than `count`.
    """
    source = _template(like)
    header = _header_like(source, np.float32)
    missing_axes = (1,) * (3 - len(source.shape))
    header.set_data_shape((*source.shape[:3], *missing_axes, count))
    header.extensions.clear()
    # One file with the voxels right after the header
    header["vox_offset"] = header.single_vox_offset
    header["magic"] = header.single_magic
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial, ImageOpener(str(partial), "wb") as file:
        header.write_to(file)
        for _, channel in zip(range(count), channels, strict=True):  # the fourth axis is the slowest
            voxels = channel.astype(header.get_data_dtype(), copy=False)
            # Plane by plane: the bytes of all planes would be another copy of the channel.
            for plane in np.moveaxis(voxels, -1, 0):
                file.write(plane.tobytes(order="F"))


def _template(like: Path) -> Nifti1Image:
    """A NIfTI image with the grid of an image of any format; its voxels are not read."""
    source = nifti_image(like)
    if isinstance(source, Nifti1Image):  # not a pair of files, whose header has other fields
        return source
    shape, affine = shape_and_affine(like)
    # An array of the right shape that takes one byte of memory
    placeholder = np.broadcast_to(np.uint8(0), shape[:3])
    kind = Nifti2Image if max(shape) > _LONGEST_OF_NIFTI_1 else Nifti1Image
    image = kind(placeholder, affine)
    image.set_sform(affine, code="scanner")
    if Grid.of(shape, affine).shear < _MAX_SHEAR_OF_QFORM:
        image.set_qform(affine, code="scanner")
    image.header.set_xyzt_units("mm")
    return image


def _header_like(source: Nifti1Image, dtype: type) -> Any:
    """The header of an image, for values that are not scaled."""
    header = source.header.copy()
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    # The image's may say that voxels are vectors or points, which ITK would take these for
    header.set_intent("none")
    # No display window: the image's intensities do not apply
    header["cal_min"] = 0
    header["cal_max"] = 0
    return header
