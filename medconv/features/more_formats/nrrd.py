"""NRRD files (3D Slicer), by pynrrd: voxels and affine. Files without patient coordinates are refused.

Format: https://teem.sourceforge.net/nrrd/format.html
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.formats import ImageFormat
from medconv.data.io.nifti import check_memory
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_Header = dict[str, Any]
_SEGMENT_VALUE = re.compile(r"(Segment\d+)_LabelValue")

# `LPS`, or in words `left-posterior-superior`
_SPACE = re.compile("(R|L)(A|P)(S|I)|(?i:(right|left)-(anterior|posterior)-(superior|inferior))")


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels, the channel axis last, and the affine to mm (right, anterior, superior).

    Raises:
        ValueError: damaged, or in an unknown space.
    """
    header = _read_header(path)  # refuses what pynrrd would read from another file
    check_memory(path, header["sizes"])
    with explained(_unreadable(path)):
        array, header = _pynrrd(path).read(str(path))
    return _spatial_axes_first(path, array, header)


def grid(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Shape and affine, without the voxels.

    Raises:
        ValueError: as `read`.
    """
    header = _read_header(path)
    # An array of the right shape that takes one byte of memory
    placeholder = np.broadcast_to(np.uint8(0), tuple(header["sizes"]))
    array, affine = _spatial_axes_first(path, placeholder, header)
    return array.shape, affine


def label_names(path: Path) -> dict[int, str]:
    """The names of a segmentation of 3D Slicer (`.seg.nrrd`) by label value; empty for other files.

    Slicer numbers segments in the order in which they were drawn.
    Raises:
        ValueError: as `read`.
    """
    header = _read_header(path)
    names = {}
    for key, value in header.items():
        segment = _SEGMENT_VALUE.fullmatch(key)
        if segment:
            names[int(value)] = str(header.get(f"{segment[1]}_Name", ""))
    return names


def _pynrrd(path: Path) -> Any:
    return needed("nrrd", "nrrd", "reading NRRD", path)


def _unreadable(path: Path) -> str:
    return f"{path}: not a readable NRRD file"


def _read_header(path: Path) -> _Header:
    """Raises: ValueError: not NRRD, or a header whose voxels are in another file."""
    nrrd = _pynrrd(path)
    with explained(_unreadable(path)):  # for damaged files pynrrd raises anything
        header: _Header = nrrd.read_header(str(path))
    if "data file" in header or "datafile" in header:
        raise ValueError(f"{path}: its voxels are in another file, expected them in this one")
    return header


def _spatial_axes_first(path: Path, array: np.ndarray, header: _Header) -> tuple[np.ndarray, np.ndarray]:
    """The array as (X, Y, Z) or (X, Y, Z, channels), and its affine."""
    if any("color" in str(kind).lower() for kind in header.get("kinds", ())):
        raise ValueError(f"{path}: a colour image ({', '.join(header['kinds'])}), expected grey values")
    signs = _signs_to_ras(path, header)
    directions = np.asarray(header.get("space directions", ()), np.float64)
    if directions.shape != (array.ndim, 3):
        raise ValueError(
            f"{path}: each axis needs three numbers in `space directions`, got {directions.tolist()}"
        )
    # An axis without a direction in space, such as channels, has NaN
    is_spatial = ~np.isnan(directions).any(axis=1)
    channel_axes = np.flatnonzero(~is_spatial)
    num_spatial = int(is_spatial.sum())
    if num_spatial not in (2, 3) or len(channel_axes) > 1:
        raise ValueError(
            f"{path}: expected 2 or 3 axes in space and up to one other, "
            f"got {num_spatial} and {len(channel_axes)}"
        )
    affine = np.eye(4)
    affine[:3, :num_spatial] = directions[is_spatial].T
    affine[:3, 3] = header.get("space origin", (0.0, 0.0, 0.0))
    if len(channel_axes):
        array = np.moveaxis(array, channel_axes[0], -1)
    if num_spatial == 2:  # one slice, 1 mm thick
        first_axis, second_axis = directions[is_spatial]
        normal = np.cross(first_axis, second_axis)
        affine[:3, 2] = normal / max(float(np.linalg.norm(normal)), 1e-12)
        array = np.expand_dims(array, 2)
    return array, np.diag([*signs, 1.0]) @ affine + 0.0  # turns -0 into 0


def _signs_to_ras(path: Path, header: _Header) -> list[float]:
    """Signs that turn the file's space into right, anterior, superior.

    Raises:
        ValueError: an unknown space, or units other than mm.
    """
    space = str(header.get("space", ""))
    units = {str(unit).strip('"') for unit in header.get("space units", ["mm"])}
    match = _SPACE.fullmatch(space)
    if match is None:
        raise ValueError(f"{path}: its `space` must be left-posterior-superior or similar, got {space!r}")
    if units != {"mm"}:
        raise ValueError(f"{path}: its `space units` must be mm, got {', '.join(sorted(units))}")
    directions = [word for word in match.groups() if word]
    return [1.0 if word[0] in "RASras" else -1.0 for word in directions]


NRRD = ImageFormat(suffixes=(".nrrd", ".seg.nrrd"), read=read, grid=grid, names=label_names)
