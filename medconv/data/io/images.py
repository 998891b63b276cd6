"""Reading of images in any format: NIfTI, MGH, NRRD, DICOM series, pictures."""

import os
import pkgutil
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.nifti1 import Nifti1Pair

from medconv.data.case import Grid
from medconv.data.io import dicom, dicom_series, nifti, raster, rtstruct
from medconv.data.io.dicom_files import choice_of, is_dicom
from medconv.data.io.formats import FORMATS, NIBABEL
from medconv.data.io.grids import check_same_grid
from medconv.data.io.label_values import Relabel, relabelled
from medconv.data.io.nifti import read_header
from medconv.utils.errors import ArgumentError
from medconv.utils.memory_order import fill, in_c_order

UNORIENTED = (
    "NIfTI files that do not say where left and right are (qform_code = sform_code = 0); read as if the axes "
    "pointed left, anterior and superior, which may be mirrored"
)
# Largest distance of a label value from a whole number; scaled integers read as 0.99999997
_ROUNDING_TOLERANCE = 1e-3
_MIN_VOLUME_SHARE = 1e-6  # of a voxel, relative to a cuboid of its spacing; below it, the affine is singular


def volume_suffixes() -> tuple[str, ...]:
    """Suffixes of all formats of volumes; DICOM has none."""
    return (*NIBABEL, *FORMATS)


def suffixes() -> tuple[str, ...]:
    """Suffixes of volumes and pictures."""
    return (*volume_suffixes(), *raster.SUFFIXES)


def suffix_list() -> str:
    """`suffixes` in small letters, for messages."""
    return ", ".join(suffix for suffix in suffixes() if suffix.islower())


def stem(path: Path) -> str:
    """The file name without the suffix of its format; folder names and UIDs stay unchanged."""
    path, _ = choice_of(path)
    # In one Unicode form: a Mac may write an accent as a letter of its own, which looks the same
    name = unicodedata.normalize("NFC", path.name)
    suffix = _suffix(path)
    if suffix:
        return name[: -len(suffix)]
    is_uid = path.suffix[1:].isdecimal()  # the last number of a UID is not a suffix
    is_folder = os.path.isdir(path)  # noqa: PTH112 without an error for a name that is too long
    return name if is_folder or is_uid else Path(name).stem


def stamp(path: Path) -> list[int]:
    """Total bytes and modification time in ns of an image, which show that it was replaced.

    For several files a checksum of names and times takes the place of the time.

    Raises:
        OSError: absent.
        ValueError: a DICOM file whose series cannot be determined, or a header without its voxels.
    """
    if not _suffix(path) and is_dicom(path):
        return dicom_series.stamp(path)
    status = path.stat()
    partner = _partner(path)
    if partner == path or not partner.exists():
        return [status.st_size, status.st_mtime_ns]
    partner_status = partner.stat()
    times = sorted([(path.name, status.st_mtime_ns), (partner.name, partner_status.st_mtime_ns)])
    total_bytes = status.st_size + partner_status.st_size
    return [total_bytes, zlib.crc32(repr(times).encode())]


def _partner(path: Path) -> Path:
    """The other file of an image of two files, a header and its voxels; the same path of other images."""
    image_format = FORMATS.get(path.suffix)
    if image_format is not None and image_format.voxel_file is not None:
        return image_format.voxel_file(path)
    return path.with_suffix(nifti.PAIR.get(path.suffix, path.suffix))


def in_folder(folder: Path, argument: str) -> dict[str, Path]:
    """The image files of a folder by stem, sorted.

    DICOM, hidden files, and pictures beside volumes are left out.

    Args:
        folder: subfolders are not searched.
        argument: name of the argument that gives the folder, for messages.

    Raises:
        ValueError: no such folder, no image in it, an ending in capitals, or two files with one stem.
    """
    if not folder.is_dir():
        raise ArgumentError(argument, f" {folder}: no such folder")
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    images = [path for path in visible if path.name.endswith(suffixes())]
    volumes = [path for path in images if not raster.is_picture(path)]
    check_endings(visible, volume_suffixes() if volumes else suffixes(), argument)
    if not images:
        content = _count_suffixes(folder)
        raise ArgumentError(
            argument, f" {folder}: no image there ({suffix_list()}); the folder holds {content}"
        )
    files = volumes or images
    counts = Counter(stem(path) for path in files)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ArgumentError(argument, f" {folder}: more than one file for {', '.join(repeated[:20])}")
    return {stem(path): path for path in files}


def _count_suffixes(folder: Path) -> str:
    """The most frequent suffixes of a folder, such as `3 of .txt, 1 of LICENSE`."""
    files = [path for path in folder.iterdir() if path.is_file()]
    counts = Counter("".join(path.suffixes[-2:]) or path.name for path in files)
    return ", ".join(f"{count} of {suffix}" for suffix, count in counts.most_common(5)) or "no file"


def check_endings(paths: Sequence[Path], endings: tuple[str, ...], argument: str) -> None:
    """Check that no image is overlooked because its ending is in capitals.

    Args:
        paths: the files of one folder.
        endings: in small letters, of images.
        argument: name of the argument that gives the folder, for messages.

    Raises:
        ValueError: some of these files would be images if their endings were in small letters.
    """
    not_images = [path for path in paths if not path.name.endswith(suffixes())]
    in_capitals = [path for path in not_images if path.name.lower().endswith(endings)]
    if in_capitals:
        names = ", ".join(path.name for path in in_capitals[:20])
        raise ArgumentError(
            argument, f" {in_capitals[0].parent}: endings must be in small letters, rename {names}"
        )


def nifti_image(path: Path) -> Nifti1Pair | None:
    """A NIfTI file or pair without its voxels; None for other formats.

    Raises:
        ValueError: as `read_header`.
    """
    if _format(path) != "nibabel":
        return None
    image = read_header(path)
    return image if isinstance(image, Nifti1Pair) else None


def nifti_header(path: Path) -> Any:
    """The header of a NIfTI file or pair; None for other formats.

    Raises:
        ValueError: as `read_header`.
    """
    image = nifti_image(path)
    return None if image is None else image.header


def lacks_orientation(path: Path) -> bool:
    """Whether an image is NIfTI with neither sform nor qform.

    Raises:
        ValueError: as `read_header`.
    """
    header = nifti_header(path)
    if header is None:
        return False
    return not (header["sform_code"] or header["qform_code"])


def read_array(path: Path) -> tuple[np.ndarray, Grid]:
    """Voxels as stored (scaled if the header says so) and their grid.

    Args:
        path: a file; for DICOM a folder or a file.

    Raises:
        ValueError: missing, truncated, of an unknown format, not real numbers, or with a singular affine.
    """
    array, affine = _read(path)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{path}: expected voxels that are real numbers, got {array.dtype}")
    grid = Grid.of(array.shape, affine)
    is_finite = np.isfinite(grid.matrix).all()
    if not (is_finite and grid.voxel_mm3 > _MIN_VOLUME_SHARE * np.prod(grid.spacing_mm)):
        raise ValueError(f"{path}: its affine is singular, so it has no spacing: {grid.affine}")
    return array, grid


def read_image(paths: Sequence[Path]) -> tuple[np.ndarray, Grid]:
    """All channels of a case and their grid.

    Shape: (channels, X, Y, Z) float32; one file may hold several channels along its fourth axis.

    Args:
        paths: one per channel, or one with all channels.

    Raises:
        ValueError: as `read_array`, or channels on different grids.
    """
    channels: list[np.ndarray] = []
    grids: list[Grid] = []
    for path in paths:
        array, grid = read_array(path)
        grids.append(grid)
        check_same_grid(paths[0], grids[0], path, grid)
        channels += list(np.moveaxis(array.reshape(*grid.shape, -1), -1, 0))
    # Converted and put in order at once: a whole-body CT is 700 MB.
    image = np.empty((len(channels), *grids[0].shape), np.float32)
    for index, channel in enumerate(channels):
        fill(image[index], channel)
    return image, grids[0]


def read_label(
    path: Path, like: Path | None = None, relabel: Relabel | None = None
) -> tuple[np.ndarray, Grid]:
    """A label map and its grid; values within 0.001 of whole numbers are rounded.

    Shape: (X, Y, Z) int16.

    Args:
        path: the label map, or contours (RTSTRUCT).
        like: an image or label map of the case, on whose grid contours are filled.
        relabel: see `Case.relabel`.

    Raises:
        ValueError: as `read_array` or `rtstruct.read`, a value that is not a whole number, of which it names
            the worst and its voxel, or one that is not among those to relabel.
    """
    if rtstruct.structures_of(path):
        image = like or path
        grid = Grid.of(*shape_and_affine(image))
        label = rtstruct.read(path, image, grid)
        return label if relabel is None else relabelled(label, relabel, path), grid
    if raster.is_picture(path):
        array = raster.read_mask(path)
        grid = Grid.of(array.shape, np.eye(4))
    else:
        array, grid = read_array(path)
    if array.size != np.prod(grid.shape):
        raise ValueError(f"{path}: a label map has one value per voxel, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = _whole_numbers(path, array)
    lowest = array.min()
    if relabel is not None and lowest >= 0:
        array = relabelled(array.astype(np.int64, copy=False), relabel, path)
    if lowest < 0 or array.max() > np.iinfo(np.int16).max:
        raise ValueError(f"{path}: label values must lie in 0..32767, found {lowest} to {array.max()}")
    return in_c_order(array.reshape(grid.shape), np.int16), grid


def _whole_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Rounded label values.

    Raises: ValueError: a value that is not finite, or not close to a whole number.
    """
    is_finite = np.isfinite(array)
    if not is_finite.all():
        raise ValueError(f"{path}: {(~is_finite).sum()} label values are not finite")
    rounded: np.ndarray = np.rint(array)
    distance = np.abs(array - rounded)
    if distance.max() > _ROUNDING_TOLERANCE:
        voxel = tuple(int(index) for index in np.unravel_index(distance.argmax(), distance.shape))
        raise ValueError(
            f"{path}: label values must be whole numbers, "
            f"found {float(array[voxel]):.9g} at voxel {voxel}; "
            f"within {_ROUNDING_TOLERANCE} of one they are rounded"
        )
    return rounded


def shape_and_affine(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Axes and affine of an image of any format, without its voxels.

    Raises:
        ValueError: as `read_array`.
    """
    image_format = _format(path)
    if image_format == "nibabel":
        image = read_header(path)
        return image.shape, image.affine
    if image_format == "dicom":
        volume = dicom.volumes(path)[0]
        return dicom.shape(volume), dicom.affine(volume)
    if image_format == "picture":
        return (*raster.size(path), 1), np.eye(4)
    return FORMATS[image_format].grid(path)


def num_channels(path: Path) -> int:
    """Channels of an image file; for a picture from its header.

    Raises:
        ValueError: as `read_array`.
    """
    if raster.is_picture(path):
        return raster.channels(path)
    image, _ = read_image([path])
    return len(image)


def _format(path: Path) -> str:
    """`nibabel`, `dicom`, `picture`, or a suffix of `FORMATS`: by the file name, else by its content."""
    if raster.is_picture(path):
        return "picture"
    suffix = _suffix(path)
    if suffix in FORMATS:
        return suffix
    return "dicom" if not suffix and is_dicom(path) else "nibabel"


def _suffix(path: Path) -> str:
    """The suffix of a format; empty if the file name has none."""
    matches = [suffix for suffix in (*suffixes(), ".img") if path.name.endswith(suffix)]
    return max(matches, key=len, default="")  # a registered suffix may end in another


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels and affine, by the reader of the format."""
    image_format = _format(path)
    if image_format == "nibabel":
        return nifti.read(path)
    if image_format == "dicom":
        return dicom.read(path)
    if image_format == "picture":
        return raster.read(path), np.eye(4)
    nifti.check_readable(path)
    array, affine = FORMATS[image_format].read(path)
    nifti.check_shape(path, array.shape)
    return array, affine


# At the end, since these modules import this one; formats register themselves
for _module in pkgutil.iter_modules([str(Path(__file__).parent)]):
    import_module(f"{__package__}.{_module.name}")
