"""NIfTI (one file or a pair) and MGH, by nibabel: headers, voxels and clear errors."""

import gzip
import logging
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError, SerializableImage
from nibabel.freesurfer import MGHImage
from nibabel.nifti1 import Nifti1Pair
from nibabel.openers import ImageOpener
from nibabel.spatialimages import HeaderDataError, SpatialImage

from medconv.utils.errors import explained

_NOT_MM = {1: "metres", 3: "microns"}  # by the code in `xyzt_units`
PAIR = {".hdr": ".img", ".img": ".hdr"}
_DAMAGED = (ImageFileError, HeaderDataError, OSError, EOFError, ValueError, zlib.error)  # what nibabel raises


_reading = ContextVar("reading", default="")  # the file that this thread reads


class _NamesFile(logging.Filter):
    """Puts the file in front of what nibabel logs about a header, once per file."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        path, message = _reading.get(), record.getMessage()
        if not path:
            return True
        record.msg, record.args = f"{path}: {message}", ()
        is_new = (path, message) not in self.said
        self.said.add((path, message))
        return is_new


nib.imageglobals.logger.addFilter(_NamesFile())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    token = _reading.set(str(path))
    try:
        yield
    finally:
        _reading.reset(token)


def read_header(path: Path) -> SpatialImage:
    """Open NIfTI (one file, or a pair) or MGH without reading the voxels.

    Raises: ValueError: missing, empty, or of another format.
    """
    check_readable(path)
    with explained(f"{path}: not a readable NIfTI file", *_DAMAGED), _naming(path):
        image = nib.load(path)
    if not isinstance(image, (Nifti1Pair, MGHImage)):
        hint = ", which does not store left and right" if path.suffix in PAIR else ""
        raise ValueError(f"{path}: expected NIfTI or MGH, got {type(image).__name__}{hint}")
    return image


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels as stored (scaled if the header says so), and the affine. Raises: ValueError: damaged."""
    image = read_header(path)
    check_shape(path, image.shape)
    problem = f"{path}: damaged or truncated, its voxels cannot be read"
    with explained(problem, *_DAMAGED, MemoryError), _naming(path):
        array = _voxels(path, image)
    _check_spacing(path, image)
    return array, image.affine


def check_readable(path: Path) -> None:
    """Raises: ValueError: missing, empty, a folder, or without permission."""
    try:
        status = path.stat()  # unlike `is_file` in Python 3.14, it reports missing permission
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path}: a folder without a DICOM file, expected an image or a series")
        if status.st_size == 0:
            raise ValueError(f"{path}: the file is empty (0 bytes)")
        path.open("rb").close()  # nibabel does not report missing permission
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path}: no such file") from error
    except PermissionError as error:
        raise ValueError(f"{path}: no permission to read it") from error


def check_shape(path: Path, shape: Sequence[int]) -> None:
    """Raises: ValueError: neither an image nor a volume, with or without channels."""
    if not 2 <= len(shape) <= 4 or min(shape) < 1:
        raise ValueError(f"{path}: expected 2, 3 or 4 axes of at least one voxel, got shape {tuple(shape)}")


def _voxels(path: Path, image: SpatialImage) -> np.ndarray:
    """As `image.dataobj`, but reads a compressed file to its end, which verifies its checksum."""
    if path.suffix not in (".gz", ".mgz") or not isinstance(image, SerializableImage):
        return np.asanyarray(image.dataobj)
    with gzip.open(path) as file:
        array = np.asanyarray(type(image).from_stream(file).dataobj)
        while file.read(1 << 20):
            pass
    return array


def _check_spacing(path: Path, image: SpatialImage) -> None:
    """If the affine comes from `pixdim`, nibabel turns 0 into 1 mm and drops a minus sign.

    Raises: ValueError: a spacing that is not in mm, or not positive; a single slice may have no thickness.
    """
    if not isinstance(image, Nifti1Pair):
        return
    if unit := _NOT_MM.get(int(image.header["xyzt_units"]) & 7):
        raise ValueError(f"{path}: its spacing is in {unit}, expected mm")
    if image.header["sform_code"]:
        return
    with ImageOpener(str(path.with_suffix(".hdr") if path.suffix == ".img" else path)) as file:
        stored = image.header_class.from_fileobj(file, check=False)["pixdim"][1:4]
    sizes = enumerate(zip(image.shape[:3], stored, strict=False))
    if wrong := [f"{mm:g} mm along axis {axis}" for axis, (n, mm) in sizes if n > 1 and not mm > 0]:
        raise ValueError(f"{path}: its spacing is {', '.join(wrong)}, expected more than 0")
