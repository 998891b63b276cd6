"""Image files of every format, damaged ones as well, and the check that an error names file and fault."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from medconv.data.io.images import read_array

from .volumes import rotation

OBLIQUE = np.eye(4)
OBLIQUE[:3, :3] = rotation((10, -20, 30)) @ np.diag([0.7, 0.8, 3.0])
OBLIQUE[:3, 3] = (-90, 12.5, 40)


def header_pair(path: Path, array: np.ndarray) -> Path:
    """A NIfTI pair. Returns: the header, .hdr."""
    nib.save(nib.Nifti1Pair(array, OBLIQUE), path.with_suffix(".img"))
    return path.with_suffix(".hdr")


def voxel_pair(path: Path, array: np.ndarray) -> Path:
    """A NIfTI pair. Returns: the voxels, .img."""
    return header_pair(path, array).with_suffix(".img")


def mgh(path: Path, array: np.ndarray) -> Path:
    nib.save(nib.MGHImage(array, OBLIQUE), path.with_suffix(".mgh"))
    return path.with_suffix(".mgh")


def mgz(path: Path, array: np.ndarray) -> Path:
    nib.save(nib.MGHImage(array, OBLIQUE), path.with_suffix(".mgz"))
    return path.with_suffix(".mgz")


def nrrd(path: Path, array: np.ndarray, axes: str = "left-posterior-superior", **header: Any) -> Path:
    """As 3D Slicer writes it, in left, posterior, superior; channels come first. None removes a field."""
    pynrrd = pytest.importorskip("nrrd", reason="the extra `nrrd`")
    signs = np.array([{"l": -1, "p": -1, "i": -1}.get(word[0], 1) for word in axes.split("-")])
    directions = (OBLIQUE[:3, :3] * signs[:, None]).T
    if array.ndim == 4:
        array, directions = np.moveaxis(array, -1, 0), np.vstack([np.full(3, np.nan), directions])
    grid = {"space": axes, "space directions": directions, "space origin": OBLIQUE[:3, 3] * signs}
    kinds = ["list", *["domain"] * 3] if array.ndim == 4 else ["domain"] * 3
    fields = {**grid, "kinds": kinds, "encoding": "gzip", **header}
    pynrrd.write(str(path.with_suffix(".nrrd")), array, {k: v for k, v in fields.items() if v is not None})
    return path.with_suffix(".nrrd")


def nrrd_in_ras(path: Path, array: np.ndarray) -> Path:
    return nrrd(path, array, "right-anterior-superior")


def mha(path: Path, array: np.ndarray, as_vectors: bool = True, suffix: str = ".mha") -> Path:
    """As SimpleITK writes it, in left, posterior, superior; channels as vectors, or as a fourth axis."""
    sitk = pytest.importorskip("SimpleITK", reason="the extra `itk`")
    matrix = np.diag([-1.0, -1.0, 1.0, 1.0]) @ OBLIQUE
    spacing_mm = np.linalg.norm(matrix[:3, :3], axis=0)
    direction = np.eye(4)
    direction[:3, :3] = matrix[:3, :3] / spacing_mm
    num_axes = 3 if as_vectors else array.ndim
    axes = [*range(num_axes)[::-1], *range(num_axes, array.ndim)]
    image = sitk.GetImageFromArray(
        np.ascontiguousarray(array.transpose(axes)), isVector=array.ndim > num_axes
    )
    image.SetSpacing([*spacing_mm, 1.0][:num_axes])
    image.SetOrigin([*matrix[:3, 3], 0.0][:num_axes])
    image.SetDirection(direction[:num_axes, :num_axes].ravel().tolist())
    sitk.WriteImage(image, str(path.with_suffix(suffix)), suffix == ".mha")
    return path.with_suffix(suffix)


def mha_of_four_axes(path: Path, array: np.ndarray) -> Path:
    return mha(path, array, as_vectors=False)


def mhd(path: Path, array: np.ndarray) -> Path:
    """Voxels in a `.raw` file, without compression."""
    return mha(path, array, suffix=".mhd")


def mhd_compressed(path: Path, array: np.ndarray) -> Path:
    """Voxels in a `.zraw` file."""
    sitk = pytest.importorskip("SimpleITK", reason="the extra `itk`")
    header = mhd(path, array)
    image = sitk.ReadImage(str(header))
    header.with_suffix(".raw").unlink()
    sitk.WriteImage(image, str(header), True)
    return header


def set_fields(**fields: object) -> Callable[[np.ndarray], None]:
    """For `volumes.save_raw`: sets fields of a NIfTI header."""

    def edit(header: np.ndarray) -> None:
        for name, value in fields.items():
            header[name] = value

    return edit


def flip_a_bit(path: Path) -> Path:
    """Without compression any byte decodes to something, so only the checksum shows the change."""
    content = bytearray(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0))
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def assert_error_names(path: Path, message: str, folder: Path | None = None) -> None:
    """Reading `folder` (default: `path`) fails with this message, in one line that begins with `path`."""
    with pytest.raises(ValueError, match=message) as error:
        read_array(folder or path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)  # `check` prints one line per fault
