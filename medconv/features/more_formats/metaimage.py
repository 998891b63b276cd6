"""MetaImage files (grand-challenge.org), by SimpleITK: `.mha`, and `.mhd` with a file of voxels beside it.

Format: https://itk.org/Wiki/ITK/MetaIO/Documentation
"""

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.formats import ImageFormat
from medconv.data.io.nifti import check_memory, check_readable
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_MAX_NAME = 100  # letters of a file name in a message
_HEADER_BYTES = 1 << 20  # in which `ElementDataFile`, the last line of a header, must stand
_LOCAL = "LOCAL"  # the voxels follow the header
_FALSE = ("F", "f", "0")  # first letters, as ITK reads them
_BLOCK_BYTES = 1 << 18  # that are decompressed at once
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels, the channel axis last, and the affine to mm (right, anterior, superior).

    Raises:
        ValueError: damaged, larger than memory, or with its voxels in a file that is not beside it.
    """
    header = _read_header(path)
    check_memory(path, header.GetSize())
    with explained(_unreadable(path)):
        image = _sitk(path).ReadImage(str(path))
    array = _sitk(path).GetArrayFromImage(image)
    _check_complete(path, array.nbytes)
    # (t, z, y, x) to (x, y, z, t); vectors are the last axis already
    num_axes = image.GetDimension()
    array = array.transpose(*range(num_axes)[::-1], *range(num_axes, array.ndim))
    if num_axes == 2:
        array = np.expand_dims(array, 2)
    return array, _affine(header)


def grid(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Shape and affine, without the voxels.

    Raises:
        ValueError: as `read`.
    """
    header = _read_header(path)
    shape = [int(size) for size in header.GetSize()]
    if len(shape) == 2:
        shape.append(1)
    if header.GetNumberOfComponents() > 1:
        shape.append(int(header.GetNumberOfComponents()))
    return tuple(shape), _affine(header)


def write(path: Path, label: np.ndarray, affine: np.ndarray) -> None:
    """Write a label map, compressed. Shape: (X, Y, Z)."""
    matrix = _LPS_TO_RAS @ affine
    spacing_mm = np.linalg.norm(matrix[:3, :3], axis=0)
    image = _sitk(path).GetImageFromArray(np.ascontiguousarray(label.T))
    image.SetSpacing(spacing_mm.tolist())
    image.SetDirection((matrix[:3, :3] / spacing_mm).ravel().tolist())
    image.SetOrigin(matrix[:3, 3].tolist())
    _sitk(path).WriteImage(image, str(path), True)


def _sitk(path: Path) -> Any:
    return needed("SimpleITK", "itk", "MetaImage", path)


def _unreadable(path: Path) -> str:
    return f"{path}: not a readable MetaImage file"


def voxel_file(path: Path) -> Path:
    """The file of an image's voxels: the same one, or one in the same folder.

    Raises:
        ValueError: no MetaImage, or one whose voxels are elsewhere, or in several files.
    """
    name = _fields(path)["ElementDataFile"]
    if name.upper() == _LOCAL:
        return path
    voxels = path.parent / name
    if Path(name).name != name or "%" in name or not voxels.is_file():
        raise ValueError(
            f"{path}: its voxels must be in it (`ElementDataFile = {_LOCAL}`), or in one file beside it, got "
            f"{name[:_MAX_NAME]}"
        )
    return voxels


def _fields(path: Path) -> dict[str, str]:
    """The fields of a header, of which `ElementDataFile` is the last. Raises: ValueError: no MetaImage."""
    check_readable(path)
    text = _header_bytes(path).decode("latin-1")
    pairs = [line.partition("=") for line in text.splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    if not fields.get("ElementDataFile"):
        raise ValueError(f"{_unreadable(path)} (its header has no ElementDataFile)")
    return fields


def _header_bytes(path: Path) -> bytes:
    """The lines until `ElementDataFile`, where the voxels begin if they are in the same file."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    header = re.match(rb"(?s).*?^[ \t]*ElementDataFile[ \t]*=[^\n]*\n?", start, re.MULTILINE)
    return header[0] if header else b""


def _read_header(path: Path) -> Any:
    """Raises: ValueError: as `voxel_file`."""
    reader = _sitk(path).ImageFileReader()
    voxel_file(path)
    with explained(_unreadable(path)):
        reader.SetImageIO("MetaImageIO")
        reader.SetFileName(str(path))
        reader.ReadImageInformation()
    return reader


def _check_complete(path: Path, num_bytes: int) -> None:
    """Check that a file holds all voxels; of compressed ones, SimpleITK fills up what is missing in silence.

    Raises:
        ValueError: fewer or more bytes than the header declares.
    """
    fields = _fields(path)
    voxels = voxel_file(path)
    skipped = fields.get("HeaderSize", "0")
    is_text = fields.get("BinaryData", "True")[:1] in _FALSE
    if is_text or not skipped.isdecimal():  # -1: the voxels are the end of their file
        return
    begin = int(skipped) if voxels != path else len(_header_bytes(path))
    if fields.get("CompressedData", "False")[:1] not in _FALSE:
        stored_bytes = _decompressed_bytes(voxels, begin)
    else:
        stored_bytes = voxels.stat().st_size - begin
    if stored_bytes != num_bytes:
        raise ValueError(
            f"{_unreadable(voxels)} ({stored_bytes} bytes of voxels, the header of {path.name} declares "
            f"{num_bytes})"
        )


def _decompressed_bytes(path: Path, begin: int) -> int:
    """Raises: ValueError: damaged, or cut off."""
    decompressor = zlib.decompressobj()
    num_bytes = 0
    with path.open("rb") as file, explained(_unreadable(path)):
        file.seek(begin)
        while block := file.read(_BLOCK_BYTES):
            num_bytes += len(decompressor.decompress(block))
    if not decompressor.eof:
        raise ValueError(f"{_unreadable(path)} (it is cut off after {num_bytes} bytes of voxels)")
    return num_bytes


def _affine(header: Any) -> np.ndarray:
    """From voxels to mm (right, anterior, superior); MetaImage has left, posterior, superior."""
    num_axes = header.GetDimension()
    num_spatial = min(3, num_axes)
    direction = np.array(header.GetDirection()).reshape(num_axes, num_axes)
    affine = np.eye(4)
    spatial = slice(0, num_spatial)
    affine[spatial, spatial] = direction[spatial, spatial] * np.array(header.GetSpacing())[spatial]
    affine[spatial, 3] = header.GetOrigin()[:num_spatial]
    return _LPS_TO_RAS @ affine + 0.0  # turns -0 into 0


METAIMAGE = ImageFormat(suffixes=(".mha",), read=read, grid=grid, write=write)
# Label maps of images of two files are written as NIfTI
METAIMAGE_HEADER = ImageFormat(suffixes=(".mhd",), read=read, grid=grid, voxel_file=voxel_file)
