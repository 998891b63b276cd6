"""MetaImage files (`.mha`, as on grand-challenge.org), by SimpleITK: voxels, affine, and label maps.

Format: https://itk.org/Wiki/ITK/MetaIO/Documentation
"""

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.formats import register
from medconv.data.io.nifti import check_memory, check_readable
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_HEADER_BYTES = 64 * 1024  # in which `ElementDataFile`, the last line of a header, must stand
_BLOCK_BYTES = 1 << 18  # that are decompressed at once
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels, the channel axis last, and the affine to mm (right, anterior, superior).

    Raises:
        ValueError: damaged, larger than memory, or with its voxels in another file.
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


def _read_header(path: Path) -> Any:
    """Raises: ValueError: no MetaImage, or one whose voxels are in another file."""
    reader = _sitk(path).ImageFileReader()
    check_readable(path)
    with path.open("rb") as file:
        _, _, voxels = file.read(_HEADER_BYTES).partition(b"ElementDataFile")
    data_file = voxels.partition(b"\n")[0].strip(b" =\r")
    if data_file != b"LOCAL":
        raise ValueError(f"{path}: its voxels are not in this file (`ElementDataFile = LOCAL`)")
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
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
        header = start[: start.index(b"LOCAL", start.index(b"ElementDataFile"))]
        if not re.search(rb"^CompressedData *= *True", header, re.MULTILINE):
            return
        file.seek(start.index(b"\n", len(header)) + 1)
        decompressor = zlib.decompressobj()
        stored_bytes = 0
        with explained(_unreadable(path)):
            while block := file.read(_BLOCK_BYTES):
                stored_bytes += len(decompressor.decompress(block))
    if stored_bytes != num_bytes or not decompressor.eof:
        raise ValueError(
            f"{_unreadable(path)} ({stored_bytes} bytes of voxels, its header declares {num_bytes})"
        )


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


register(".mha", read, grid, write)
