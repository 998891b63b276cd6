"""Reading and writing of images in any format: NIfTI, MGH, NRRD, DICOM series, pictures.

Results are NIfTI on the grid of the source image, or PNG for pictures; `dicom_seg` writes DICOM SEG.
"""

import os
import pkgutil
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.nifti1 import Nifti1Image, Nifti1Pair
from nibabel.openers import ImageOpener

from medconv.data.case import Grid
from medconv.data.io import dicom, dicom_series, nifti, raster, rtstruct
from medconv.data.io.dicom_headers import choice_of, is_dicom
from medconv.data.io.formats import FORMATS, NIBABEL
from medconv.data.io.grids import check_same_grid
from medconv.data.io.nifti import read_header
from medconv.utils.atomic_io import replacing

UNORIENTED = (
    "NIfTI files that do not say where left and right are (qform_code = sform_code = 0); read as if the axes "
    "pointed left, anterior and superior, which may be mirrored"
)
WHOLE = 1e-3  # largest distance of a label value from a whole number; scaled integers read as 0.99999997


for _module in pkgutil.iter_modules([str(Path(__file__).parent)]):  # formats register themselves
    import_module(f"{__package__}.{_module.name}")


def volume_suffixes() -> tuple[str, ...]:
    """Of all formats of volumes but DICOM."""
    return (*NIBABEL, *FORMATS)


def suffixes() -> tuple[str, ...]:
    """Of volumes and pictures."""
    return (*volume_suffixes(), *raster.SUFFIXES)


def known() -> str:
    """`suffixes`, for messages."""
    return ", ".join(suffix for suffix in suffixes() if suffix.islower())


def stem(path: Path) -> str:
    """The file name without the suffix of its format; folder names and UIDs stay unchanged."""
    path, _ = choice_of(path)
    if suffix := _suffix(path):
        return path.name[: -len(suffix)]
    is_uid = path.suffix[1:].isdecimal()  # the last number of a UID is not a suffix
    is_folder = os.path.isdir(path)  # noqa: PTH112 without an error for a name that is too long
    return path.name if is_folder or is_uid else path.stem


def stamp(path: Path) -> list[int]:
    """Detects that an image was replaced: bytes and modification time in ns; of several files, a checksum.

    Raises: OSError: absent. ValueError: a DICOM file whose series cannot be determined.
    """
    if not _suffix(path) and is_dicom(path):
        return dicom_series.stamp(path)
    stat = path.stat()
    partner = path.with_suffix(nifti.PAIR.get(path.suffix, path.suffix))
    if partner == path or not partner.exists():
        return [stat.st_size, stat.st_mtime_ns]
    other = partner.stat()
    times = sorted([(path.name, stat.st_mtime_ns), (partner.name, other.st_mtime_ns)])
    return [stat.st_size + other.st_size, zlib.crc32(repr(times).encode())]


def in_folder(folder: Path, option: str) -> dict[str, Path]:
    """The image files of a folder, by stem, sorted; without DICOM, hidden files, and pictures beside volumes.

    Args: option: the option or key of the folder, for messages.
    Raises: ValueError: no such folder, no image in it, an ending in capitals, or two files with one stem.
    """
    if not folder.is_dir():
        raise ValueError(f"{option} {folder}: no such folder")
    shown = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in shown if path.name.endswith(suffixes())]
    pictures = all(map(raster.is_picture, files))  # beside volumes they are not read
    check_endings(shown, suffixes() if pictures else volume_suffixes(), option)
    if not files:
        counts = Counter("".join(p.suffixes[-2:]) or p.name for p in folder.iterdir() if p.is_file())
        there = ", ".join(f"{number} of {name}" for name, number in counts.most_common(5)) or "no file"
        raise ValueError(f"{option} {folder}: no image there ({known()}); the folder holds {there}")
    files = [path for path in files if not raster.is_picture(path)] or files
    if twice := sorted(name for name, count in Counter(map(stem, files)).items() if count > 1):
        raise ValueError(f"{option} {folder}: more than one file for {', '.join(twice[:20])}")
    return {stem(path): path for path in files}


def check_endings(paths: Sequence[Path], endings: tuple[str, ...], option: str) -> None:
    """Raises: ValueError: some of these files would be images if their endings were in small letters."""
    others = [path for path in paths if not path.name.endswith(suffixes())]
    if loud := [path for path in others if path.name.lower().endswith(endings)]:
        listed = ", ".join(path.name for path in loud[:20])
        raise ValueError(f"{option} {loud[0].parent}: endings must be in small letters, rename {listed}")


def nifti_header(path: Path) -> Any:
    """The header of a NIfTI file or pair; None for other formats. Raises: ValueError: as `read_header`."""
    image = read_header(path) if _format(path) == "nibabel" else None
    return image.header if isinstance(image, Nifti1Pair) else None


def lacks_orientation(path: Path) -> bool:
    """Whether it is NIfTI with neither sform nor qform. Raises: ValueError: as `read_header`."""
    header = nifti_header(path)
    return header is not None and not (header["sform_code"] or header["qform_code"])


def read_array(path: Path) -> tuple[np.ndarray, Grid]:
    """Voxels as stored (scaled if the header says so) and their grid; for DICOM, a folder or a file.

    Raises: ValueError: missing, truncated, of an unknown format, not real numbers, or with a singular affine.
    """
    array, affine = _read(path)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{path}: expected voxels that are real numbers, got {array.dtype}")
    grid = Grid.of(array.shape, affine)
    if not (np.isfinite(grid.matrix).all() and grid.voxel_mm3 > 1e-6 * np.prod(grid.spacing_mm)):
        raise ValueError(f"{path}: its affine is singular, so it has no spacing: {grid.affine}")
    return array, grid


def read_image(paths: Sequence[Path]) -> tuple[np.ndarray, Grid]:
    """All channels of a case.

    Shape: (channels, X, Y, Z) float32; one file may hold several channels along its fourth axis.
    Raises: ValueError: as `read_array`, or channels on different grids.
    """
    channels: list[np.ndarray] = []
    grids: list[Grid] = []
    for path in paths:
        array, grid = read_array(path)
        grids.append(grid)
        check_same_grid(paths[0], grids[0], path, grid)
        channels += list(np.moveaxis(array.reshape(*grid.shape, -1).astype(np.float32), -1, 0))
    return np.stack(channels), grids[0]


def read_label(path: Path, like: Path | None = None) -> tuple[np.ndarray, Grid]:
    """A label map; values within `WHOLE` of whole numbers are rounded. Shape: (X, Y, Z) int16.

    Args: like: an image or label map of the case, on whose grid contours (RTSTRUCT) are filled.
    Raises: ValueError: as `read_array` or `rtstruct.read`, or a value that is not a whole number; names the
        worst and its voxel.
    """
    if rtstruct.structures_of(path):
        source = _template(like or path)
        grid = Grid.of(source.shape, source.affine)
        return rtstruct.read(path, like or path, grid), grid
    if raster.is_picture(path):
        array = raster.read_mask(path)
        grid = Grid.of(array.shape, np.eye(4))
    else:
        array, grid = read_array(path)
    if array.size != np.prod(grid.shape):
        raise ValueError(f"{path}: a label map has one value per voxel, got shape {array.shape}")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {(~np.isfinite(array)).sum()} label values are not finite")
        rounded = np.rint(array)
        off = np.abs(array - rounded)
        if off.max() > WHOLE:
            voxel = tuple(map(int, np.unravel_index(off.argmax(), off.shape)))
            raise ValueError(
                f"{path}: label values must be whole numbers, found {float(array[voxel]):.9g} at voxel "
                f"{voxel}; within {WHOLE} of one they are rounded"
            )
        array = rounded
    if array.min() < 0 or array.max() > np.iinfo(np.int16).max:
        raise ValueError(f"{path}: label values must lie in 0..32767, found {array.min()} to {array.max()}")
    return array.reshape(grid.shape).astype(np.int16), grid


def write_label(path: Path, label: np.ndarray, like: Path) -> None:
    """Write a label map atomically: a picture if the path ends in .png, else NIfTI with affine and header of
    the image `like`; if that has another format, sform and qform are set from its grid.

    Shape: label (X, Y, Z). Raises: OSError: no space left, or no permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial:  # an existing file counts as done
        if raster.is_picture(path):
            raster.write_mask(partial, label)
        else:
            source, dtype = _template(like), np.uint8 if label.max(initial=0) < 256 else np.int16
            array, header = label.reshape(source.shape[:3]).astype(dtype), _header_like(source, dtype)
            nib.save(Nifti1Image(array, source.affine, header), partial)


def write_channels(path: Path, channels: Iterable[np.ndarray], count: int, like: Path) -> None:
    """Write volumes as one 4D float32 NIfTI, one at a time as the iterator gives them; else as `write_label`.

    Shape: `count` times (X, Y, Z); a 2D image also becomes 4D, with Z = 1.
    """
    source = _template(like)
    header = _header_like(source, np.float32)
    header.set_data_shape((*source.shape[:3], *(1,) * (3 - len(source.shape)), count))
    header.extensions.clear()
    header["vox_offset"], header["magic"] = header.single_vox_offset, header.single_magic
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial, ImageOpener(str(partial), "wb") as file:
        header.write_to(file)
        for _, channel in zip(range(count), channels, strict=True):  # the fourth axis is the slowest
            file.write(channel.astype(header.get_data_dtype()).tobytes(order="F"))


def num_channels(path: Path) -> int:
    """Channels of an image file; for a picture from its header. Raises: ValueError: as `read_array`."""
    return raster.channels(path) if raster.is_picture(path) else len(read_image([path])[0])


def _format(path: Path) -> str:
    """By the suffix of the file, else by its content."""
    if raster.is_picture(path):
        return "picture"
    suffix = _suffix(path)
    if suffix in FORMATS:
        return suffix
    return "dicom" if not suffix and is_dicom(path) else "nibabel"


def _suffix(path: Path) -> str:
    """The suffix of a known format; empty if it is of none."""
    found = [suffix for suffix in (*suffixes(), ".img") if path.name.endswith(suffix)]
    return max(found, key=len, default="")


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels and affine, by the reader of the format."""
    kind = _format(path)
    if kind == "nibabel":
        return nifti.read(path)
    if kind == "dicom":
        return dicom.read(path)
    if kind == "picture":
        return raster.read(path), np.eye(4)
    nifti.check_readable(path)
    array, affine = FORMATS[kind].read(path)
    nifti.check_shape(path, array.shape)
    return array, affine


def _template(like: Path) -> Nifti1Image:
    """A NIfTI image with the grid of an image of any format; its voxels are not read."""
    kind = _format(like)
    if kind == "nibabel":
        source = read_header(like)
        if isinstance(source, Nifti1Image):
            return source
        shape, affine = source.shape, source.affine
    elif kind in FORMATS:
        shape, affine = FORMATS[kind].grid(like)
    elif kind == "picture":
        shape, affine = (*raster.size(like), 1), np.eye(4)
    else:
        volume = dicom.volumes(like)[0]
        shape, affine = dicom.shape(volume), dicom.affine(volume)
    image = Nifti1Image(np.broadcast_to(np.uint8(0), shape[:3]), affine)
    image.set_sform(affine, code="scanner")
    if Grid.of(shape, affine).shear < 0.01:  # degrees; a qform has no shear
        image.set_qform(affine, code="scanner")
    image.header.set_xyzt_units("mm")
    return image


def _header_like(source: Nifti1Image, dtype: type) -> Any:
    header = source.header.copy()
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    return header
