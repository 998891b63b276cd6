"""NIfTI (one file or a pair) and MGH, by nibabel: headers, voxels and clear errors.

Compressed files are decompressed here: `gzip` takes 8 kB at a time, and nibabel copies what it returns into
memory that was set to 0 before, together nearly twice the time of the decompression.
"""

import errno
import logging
import stat
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError, SerializableImage
from nibabel.freesurfer import MGHImage
from nibabel.nifti1 import Nifti1Header, Nifti1Pair
from nibabel.openers import ImageOpener
from nibabel.spatialimages import HeaderDataError, SpatialImage
from nibabel.volumeutils import apply_read_scaling

from medconv.data.io.formats import ImageFormat
from medconv.utils.errors import explained
from medconv.utils.hardware import total_memory

PAIR = {".hdr": ".img", ".img": ".hdr"}
_NOT_MM = {1: "metres", 3: "microns"}  # by the code in `xyzt_units`
_NO_QUATERNION = "w2 should be positive"  # nibabel's error
_thresholds = threading.Lock()  # on nibabel's setting for a whole process
_ROUNDED_QUATERNION = 1e-5  # by which the square of the fourth number may be below 0
_SPATIAL_UNIT_BITS = 7  # of `xyzt_units`; the other bits are the unit of time
LOADING = 12  # bytes a voxel, measured: three times the float32 image
FITS_ANYWHERE = 2**29  # bytes; no machine on which torch runs has less memory
_GZIP = b"\x1f\x8b"
_COMPRESSED = {".nii": ".nii.gz", ".mgh": ".mgz"}  # suffix of plain files to that of compressed ones
_UNCOMPRESSED = {".gz": "", ".mgz": ".mgh"}  # of `.nii.gz`, the stem has `.nii` already

# What nibabel raises for damaged files
_DAMAGED = (
    ImageFileError,
    HeaderDataError,
    OSError,
    EOFError,
    TypeError,  # a header that is cut off
    ValueError,
    zlib.error,
)

_current_path = ContextVar("current_path", default="")  # the file that this thread reads
_WITH_HEADER = 16 + zlib.MAX_WBITS  # that of gzip, and its checksum, which zlib compares
_COMPRESSED_BYTES = 2**17  # that are read at once
_PIECE_BYTES = 2**18  # that are decompressed at once, and stay in the cache until they are copied


class _PathFilter(logging.Filter):
    """Puts the file's path before what nibabel logs about its header, and drops repeated messages."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        path = _current_path.get()
        if not path:
            return True
        message = record.getMessage()
        record.msg = f"{path}: {message}"
        record.args = ()
        is_new = (path, message) not in self.logged
        self.logged.add((path, message))
        return is_new


nib.imageglobals.logger.addFilter(_PathFilter())


@contextmanager
def _logging_path(path: Path) -> Iterator[None]:
    """Messages of nibabel in this block are about this file."""
    token = _current_path.set(str(path))
    try:
        yield
    finally:
        _current_path.reset(token)


def read_header(path: Path) -> SpatialImage:
    """Open NIfTI (one file, or a pair) or MGH without reading the voxels.

    Raises:
        ValueError: missing, empty, or of another format.
    """
    check_readable(path)
    # nibabel's errors do not tell a file whose suffix is wrong from a damaged one
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
    plain_name = _UNCOMPRESSED.get(path.suffix)
    if is_compressed and path.suffix in _COMPRESSED:
        raise ValueError(f"{path}: is compressed (gzip); rename it to {path.stem}{_COMPRESSED[path.suffix]}")
    if not is_compressed and plain_name is not None:
        raise ValueError(
            f"{path}: is not compressed, as {path.suffix} promises; rename it to {path.stem}{plain_name}, or "
            "copy it again if it is damaged"
        )
    with explained(f"{path}: not a readable NIfTI file", *_DAMAGED), _logging_path(path):
        image = _load(path)
    if not isinstance(image, (Nifti1Pair, MGHImage)):
        # Such as Analyze, which has the suffixes of a NIfTI pair
        hint = ", which does not store left and right" if path.suffix in PAIR else ""
        raise ValueError(f"{path}: expected NIfTI or MGH, got {type(image).__name__}{hint}")
    return image


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels as stored (scaled if the header says so), and the affine.

    Raises:
        ValueError: damaged, or without a spacing in mm.
    """
    image = read_header(path)
    check_shape(path, image.shape)
    check_memory(path, image.shape)
    is_compressed = path.suffix in (".gz", ".mgz")
    problem = f"{path}: damaged or truncated, its voxels cannot be read"
    with explained(problem, *_DAMAGED, MemoryError), _logging_path(path):
        if is_compressed and isinstance(image, SerializableImage):
            # To the end of the file, which verifies its checksum
            proxy: Any = image.dataobj
            stored = np.empty(proxy.shape, proxy.dtype, order=proxy.order)
            read_into(stored.reshape(-1, order=proxy.order).view(np.uint8).data, path, proxy.offset)
            array = apply_read_scaling(stored, np.asanyarray(proxy.slope), np.asanyarray(proxy.inter))
        else:
            array = np.asanyarray(image.dataobj)
    check_spacing(image, str(path))
    return array, image.affine


def _load(path: Path) -> SpatialImage:
    try:
        return nib.load(path)  # type: ignore[return-value]
    except ValueError as error:
        if _NO_QUATERNION not in str(error):
            raise
    # Its three numbers are rounded, so that their squares make more than 1: the fourth one is 0
    with _thresholds:
        threshold = Nifti1Header.quaternion_threshold
        Nifti1Header.quaternion_threshold = np.float32(_ROUNDED_QUATERNION)
        try:
            image: Any = nib.load(path)
        finally:
            Nifti1Header.quaternion_threshold = threshold
    numbers = np.array([image.header[f"quatern_{letter}"] for letter in "bcd"], np.float64)
    for letter, number in zip("bcd", numbers / np.linalg.norm(numbers), strict=True):
        image.header[f"quatern_{letter}"] = number
    return image  # type: ignore[no-any-return]


def check_spacing(image: SpatialImage, name: str) -> None:
    """Check that a NIfTI image has a spacing in mm; others always have.

    Args: name: for messages.
    Raises:
        ValueError: another unit, or, where the affine depends on it, a spacing that is not positive.
    """
    if not isinstance(image, Nifti1Pair):
        return
    unit = _NOT_MM.get(int(image.header["xyzt_units"]) & _SPATIAL_UNIT_BITS)
    if unit:
        raise ValueError(f"{name}: its spacing is in {unit}, expected mm")
    path = image.get_filename()
    if path and Path(path).is_file() and not image.header["sform_code"]:
        _check_pixdim(Path(path), image)


def check_readable(path: Path) -> None:
    """Check that a file exists, has content and may be read.

    Raises:
        ValueError: missing, empty, a folder, or without permission.
    """
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
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: a link that leads back to itself") from error


def check_shape(path: Path, shape: Sequence[int]) -> None:
    """Check the axes of an image, (X, Y), (X, Y, Z) or (X, Y, Z, channels).

    Raises:
        ValueError: neither an image nor a volume, with or without channels.
    """
    if not 2 <= len(shape) <= 4 or min(shape) < 1:
        raise ValueError(f"{path}: expected 2, 3 or 4 axes of at least one voxel, got shape {tuple(shape)}")


def check_memory(path: Path, shape: Sequence[int]) -> None:
    """Check that an image fits this machine, before memory is reserved for what a damaged header declares.

    Raises:
        ValueError: it takes more than the memory of the machine, or of its container.
    """
    needed_bytes = LOADING * prod(int(size) for size in shape)
    if needed_bytes < FITS_ANYWHERE:
        return
    memory = total_memory()
    if needed_bytes > memory:
        size = " x ".join(map(str, shape))
        raise ValueError(
            f"{path}: its header declares {size} voxels, which take about {needed_bytes / 2**30:.0f} GB to "
            f"read; this machine has {memory / 2**30:.0f} GB"
        )


def _check_pixdim(path: Path, image: Nifti1Pair) -> None:
    """Check the spacing as the file stores it, from which nibabel makes the affine: it turns 0 into 1 mm and
    drops a minus sign.

    Raises:
        ValueError: a spacing that is not positive; a single slice may have no thickness.
    """
    header_path = path.with_suffix(".hdr") if path.suffix == ".img" else path
    with ImageOpener(str(header_path)) as file:
        stored_header = image.header_class.from_fileobj(file, check=False)
    stored_spacing = stored_header["pixdim"][1:4]
    invalid = []
    for axis, (size, mm) in enumerate(zip(image.shape[:3], stored_spacing, strict=False)):
        if size > 1 and not mm > 0:  # `not`, for NaN
            invalid.append(f"{mm:g} mm along axis {axis}")
    if invalid:
        raise ValueError(f"{path}: its spacing is {', '.join(invalid)}, expected more than 0")


def _grid(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    image = read_header(path)
    return image.shape, image.affine


def label_names(path: Path) -> dict[int, str]:
    """The table of labels in a header extension, as Connectome Workbench and TotalSegmentator write it.

    Raises:
        ValueError: as `read_header`.
    """
    header: Any = read_header(path).header
    names: dict[int, str] = {}
    for extension in getattr(header, "extensions", ()):  # MGH has none
        text = getattr(extension, "content", None)  # bytes; nibabel before 5.3 has them by its method alone
        if text is None:
            text = extension.get_content()
        if not isinstance(text, bytes) or b"<LabelTable" not in text or b"<!ENTITY" in text:
            continue
        with suppress(ElementTree.ParseError, ValueError):  # an extension of another program
            for label in ElementTree.fromstring(text.rstrip(b"\0 ")).iter("Label"):
                names[int(label.get("Key", ""))] = (label.text or "").strip()
    return names


NIFTI = ImageFormat(
    names=label_names,
    suffixes=(".nii.gz", ".nii", ".hdr", ".mgz", ".mgh"),  # .hdr: the header of a NIfTI pair
    read=read,
    grid=_grid,
    voxel_file=lambda path: path.with_suffix(PAIR.get(path.suffix, path.suffix)),
)


def read_into(target: memoryview, path: Path, offset: int) -> None:
    """Decompress a file to its end, which verifies its checksums.

    Args:
        target: bytes; gets those from `offset` on. More that follow are left out.
    Raises:
        EOFError: the file ends too early.
        zlib.error: it is damaged.
    """
    position = -offset
    for piece in _pieces(path):
        wanted = piece[max(0, -position) : max(0, len(target) - position)]
        start = max(0, position)
        target[start : start + len(wanted)] = wanted
        position += len(piece)
    if position < len(target):
        raise EOFError(f"Expected {len(target)} bytes, got {max(0, position)}")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        compressed = file.read(_COMPRESSED_BYTES)
        # One after the other of what was compressed by itself: `bgzip` writes many blocks.
        while compressed:
            block = zlib.decompressobj(_WITH_HEADER)
            while not block.eof:
                if not compressed:
                    raise EOFError("it ends in the middle of its compressed content")
                yield block.decompress(compressed, _PIECE_BYTES)
                compressed = block.unused_data if block.eof else block.unconsumed_tail
                compressed = compressed or file.read(_COMPRESSED_BYTES)
            # `gzip` ignores such padding, too.
            while compressed and not (compressed := compressed.lstrip(b"\0")):
                compressed = file.read(_COMPRESSED_BYTES)
