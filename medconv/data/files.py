"""Reading and writing of NIfTI files; everything that touches a medical file goes through here."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.nifti1 import Nifti1Image
from nibabel.openers import ImageOpener
from nibabel.spatialimages import HeaderDataError

from medconv.atomic import replacing
from medconv.data.case import Grid

SUFFIXES = (".nii.gz", ".nii")
_DAMAGED = (ImageFileError, HeaderDataError, OSError, EOFError, ValueError, zlib.error)  # what nibabel raises


def stem(path: Path) -> str:
    """The file's name without `.nii.gz` or `.nii`."""
    for suffix in SUFFIXES:
        if path.name.endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def in_folder(folder: Path, option: str) -> dict[str, Path]:
    """The NIfTI files of a folder by their stems, in order; hidden files are left out.

    Args: option: what the user gave the folder by, for messages.
    Raises: ValueError: no such folder, no such file in it, or two files of one stem.
    """
    if not folder.is_dir():
        raise ValueError(f"{option} {folder}: no such folder")
    files = sorted(p for p in folder.iterdir() if p.name.endswith(SUFFIXES) and not p.name.startswith("."))
    if not files:
        raise ValueError(f"{option} {folder}: no {' or '.join(SUFFIXES)} file there")
    found = {stem(path): path for path in files}
    if len(found) < len(files):
        twice = sorted({stem(path) for path in files if found[stem(path)] != path})
        raise ValueError(f"{option} {folder}: more than one file for {', '.join(twice[:20])}")
    return found


def read_header(path: Path) -> Nifti1Image:
    """Open a file without reading its voxels. Raises: ValueError: missing, empty, or not NIfTI."""
    try:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty (0 bytes)")
        path.open("rb").close()  # of a lack of permission nibabel does not speak
    except PermissionError as error:
        raise ValueError(f"{path}: no permission to read it") from error
    try:
        image = nib.load(path)
    except _DAMAGED as error:
        raise ValueError(f"{path}: not a readable NIfTI file ({_reason(error)})") from error
    if not isinstance(image, Nifti1Image):
        raise ValueError(f"{path}: expected NIfTI, got {type(image).__name__}")
    return image


def read_array(path: Path) -> tuple[np.ndarray, Grid]:
    """Voxels as stored (scaled if the header says so) and their grid.

    Raises: ValueError: missing, truncated, not NIfTI, not real numbers, or with an affine that maps nowhere.
    """
    image = read_header(path)
    if not 2 <= len(image.shape) <= 4 or min(image.shape) < 1:
        raise ValueError(f"{path}: expected 2, 3 or 4 axes of at least one voxel, got shape {image.shape}")
    try:
        array = _voxels(path, image)
    except (*_DAMAGED, MemoryError) as error:
        raise ValueError(f"{path}: damaged or truncated, its voxels cannot be read ({_reason(error)})") from error
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{path}: expected voxels that are real numbers, got {array.dtype}")
    grid = Grid.of(array.shape, image.affine)
    if not np.isfinite(grid.matrix).all() or abs(np.linalg.det(grid.matrix[:3, :3])) <= 1e-6 * np.prod(grid.spacing_mm):
        raise ValueError(f"{path}: its affine is singular, so it has no spacing: {grid.affine}")
    _check_spacing(path, image)
    return array, grid


def read_image(paths: Sequence[Path]) -> tuple[np.ndarray, Grid]:
    """All channels of a case.

    Shape: (channels, X, Y, Z) float32; one file may hold several channels along its fourth axis.
    Raises: ValueError: as `read_array`, or channels that do not lie on one grid.
    """
    channels: list[np.ndarray] = []
    first: Grid | None = None
    for path in paths:
        array, grid = read_array(path)
        first = first or grid
        check_same_grid(paths[0], first, path, grid)
        volume = array.reshape(*grid.shape, -1).astype(np.float32)
        channels += list(np.moveaxis(volume, -1, 0))
    assert first is not None
    return np.stack(channels), first


def read_label(path: Path) -> tuple[np.ndarray, Grid]:
    """A label map. Shape: (X, Y, Z) int16. Raises: ValueError: as `read_array`, or values that are not whole numbers."""
    array, grid = read_array(path)
    if array.size != np.prod(grid.shape):
        raise ValueError(f"{path}: a label map has one value per voxel, got shape {array.shape}")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ValueError(f"{path}: {_count_nonfinite(array)} label values are not finite")
        whole = np.rint(array)
        if np.abs(array - whole).max() > 1e-3:
            raise ValueError(f"{path}: label values must be whole numbers, found {float(array[array != whole][0])}")
        array = whole
    if array.min() < 0 or array.max() > np.iinfo(np.int16).max:
        raise ValueError(f"{path}: label values must lie in 0..32767, found {array.min()} to {array.max()}")
    return array.reshape(grid.shape).astype(np.int16), grid


def check_same_grid(path: Path, grid: Grid, other_path: Path, other: Grid, tolerance: float = 0.01) -> None:
    """Raises: ValueError: shapes differ, or some corner lies more than `tolerance` voxels apart."""
    if grid.shape != other.shape:
        raise ValueError(f"{other_path}: shape {other.shape} differs from that of {path.name}, {grid.shape}")
    distance = grid.corner_distance(other)
    if distance > tolerance:
        raise ValueError(
            f"{other_path}: its affine puts the volume's corners {distance:.3g} voxels from where {path.name} has them "
            f"(at most {tolerance} is allowed): {other.orientation} {_mm(other)} against {grid.orientation} {_mm(grid)}"
        )


def write_label(path: Path, label: np.ndarray, like: Path) -> None:
    """Write a label map as NIfTI, atomically, with shape, affine and header (sform, qform, units) of the image `like`.

    Shape: label (X, Y, Z). Raises: OSError: no room, or no permission.
    """
    source = read_header(like)
    dtype = np.uint8 if label.max(initial=0) < 256 else np.int16
    header = _header_like(source, dtype)
    image = Nifti1Image(label.reshape(source.shape[:3]).astype(dtype), source.affine, header)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial:  # a label map that has its name counts as done
        nib.save(image, partial)


def write_channels(path: Path, channels: Iterable[np.ndarray], count: int, like: Path) -> None:
    """Write volumes as one 4D NIfTI of float32, one after the other as they come, else as `write_label`.

    Shape: `count` times (X, Y, Z); a 2D image becomes 4D, too, with Z = 1.
    """
    source = read_header(like)
    header = _header_like(source, np.float32)
    header.set_data_shape((*source.shape[:3], *(1,) * (3 - len(source.shape)), count))
    header.extensions.clear()
    header["vox_offset"], header["magic"] = header.single_vox_offset, header.single_magic
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial, ImageOpener(str(partial), "wb") as file:
        header.write_to(file)
        written = 0
        for channel in channels:  # the fourth axis is the slowest in the file
            file.write(channel.astype(header.get_data_dtype()).tobytes(order="F"))
            written += 1
        assert written == count


def _header_like(source: Nifti1Image, dtype: type) -> Any:
    header = source.header.copy()
    header.set_data_dtype(dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    return header


def _voxels(path: Path, image: Nifti1Image) -> np.ndarray:
    """As `image.dataobj`, but a compressed file is read to its end, where its checksum stands; nibabel stops before."""
    if path.suffix != ".gz":
        return np.asanyarray(image.dataobj)
    with gzip.open(path) as file:
        array = np.asanyarray(type(image).from_stream(file).dataobj)
        while file.read(1 << 20):
            pass
    return array


def _check_spacing(path: Path, image: Nifti1Image) -> None:
    """Where the affine comes from `pixdim`, nibabel turns 0 into 1 mm and drops a minus; one slice may have no thickness."""
    if image.header["sform_code"]:
        return
    with ImageOpener(str(path)) as file:
        stored = image.header_class.from_fileobj(file, check=False)["pixdim"][1:4]
    wrong = [axis for axis, (n, mm) in enumerate(zip(image.shape[:3], stored, strict=False)) if n > 1 and not mm > 0]
    if wrong:
        found = ", ".join(f"{stored[axis]:g} mm along axis {axis}" for axis in wrong)
        raise ValueError(f"{path}: its spacing is {found}, expected more than 0")


def _reason(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _count_nonfinite(array: np.ndarray) -> int:
    return int(array.size - np.isfinite(array).sum())


def _mm(grid: Grid) -> str:
    return " x ".join(f"{s:.3g}" for s in grid.spacing_mm) + " mm"
