"""NRRD files (3D Slicer), by pynrrd: voxels and affine. Files without patient coordinates are refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.formats import register
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_SPACE = re.compile("(R|L)(A|P)(S|I)|(?i:(right|left)-(anterior|posterior)-(superior|inferior))")


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels, the channel axis last, and the affine to mm (right, anterior, superior).

    Raises: ValueError: damaged, or in an unknown space.
    """
    return _placed(path, *_opened(path, "read"))


def grid(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Shape and affine, without the voxels. Raises: ValueError: as `read`."""
    header = _opened(path, "read_header")
    array, matrix = _placed(path, np.broadcast_to(np.uint8(0), tuple(header["sizes"])), header)
    return array.shape, matrix


def _opened(path: Path, function: str) -> Any:
    nrrd = needed("nrrd", "nrrd", "reading NRRD", path)
    with explained(f"{path}: not a readable NRRD file"):  # of damaged files pynrrd raises anything
        header = nrrd.read_header(str(path))
        if not {"data file", "datafile"} & header.keys():
            return header if function == "read_header" else nrrd.read(str(path))
    raise ValueError(f"{path}: its voxels are in another file, expected them in this one")


def _placed(path: Path, array: np.ndarray, header: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if any("color" in str(kind).lower() for kind in header.get("kinds", ())):
        raise ValueError(f"{path}: a colour image ({', '.join(header['kinds'])}), expected grey values")
    signs, directions = _signs(path, header), np.asarray(header.get("space directions", ()), np.float64)
    if directions.shape != (array.ndim, 3):
        raise ValueError(
            f"{path}: each axis needs three numbers in `space directions`, got {directions.tolist()}"
        )
    spatial = [axis for axis in range(array.ndim) if not np.isnan(directions[axis]).any()]
    others = [axis for axis in range(array.ndim) if axis not in spatial]
    if len(spatial) not in (2, 3) or len(others) > 1:
        counts = f"{len(spatial)} and {len(others)}"
        raise ValueError(f"{path}: expected 2 or 3 axes in space and up to one other, got {counts}")
    matrix = np.eye(4)
    matrix[:3, : len(spatial)] = directions[spatial].T
    matrix[:3, 3] = header.get("space origin", (0.0, 0.0, 0.0))
    array = np.moveaxis(array, others[0], -1) if others else array
    if len(spatial) == 2:  # one slice, 1 mm thick
        across = np.cross(*directions[spatial])
        matrix[:3, 2] = across / max(float(np.linalg.norm(across)), 1e-12)
        array = np.expand_dims(array, 2)
    return array, np.diag([*signs, 1.0]) @ matrix + 0.0  # no -0


def _signs(path: Path, header: dict[str, Any]) -> list[float]:
    """Signs from the axes of the file to right, anterior, superior. Raises: ValueError: others, or not mm."""
    space = str(header.get("space", ""))
    units = {str(unit).strip('"') for unit in header.get("space units", ["mm"])}
    match = _SPACE.fullmatch(space)
    if match is None:
        raise ValueError(f"{path}: its `space` must be left-posterior-superior or similar, got {space!r}")
    if units != {"mm"}:
        raise ValueError(f"{path}: its `space units` must be mm, got {', '.join(sorted(units))}")
    return [1.0 if word[0] in "RASras" else -1.0 for word in match.groups() if word]


register(".nrrd", read, grid)
