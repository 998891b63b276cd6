"""Label maps from RTSTRUCT, the contours of radiotherapy: `rs.dcm#roi=heart;lung` are the labels 1 and 2."""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.data.io import dicom
from medconv.data.io.dicom_files import choice_of, is_dicom
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_ROI = "#roi="
_OFF_PLANE = 0.1  # slices by which a contour may lie beside the middle of its slice
_DIGITS = 4  # of a place in voxels; headers give places as decimals
_CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


def structures_of(path: str | Path) -> list[str]:
    """The structures that a path or pattern takes, in the order of their label values; empty: it takes none.

    Each may be several names, `Heart|Herz`, of which a file has one; upper and lower case are the same. An
    empty name is a label value that the file need not have.
    """
    choice = choice_of(Path(path))[1]
    return choice.removeprefix(_ROI).split(";") if choice.startswith(_ROI) else []


def without(path: Path, values: Collection[int]) -> Path:
    """The path that takes the same structures but for those of these label values, as `heart;;lung`."""
    names = ["" if value in values else name for value, name in enumerate(structures_of(path), 1)]
    return Path(f"{choice_of(path)[0]}{_ROI}{';'.join(names)}") if names else path


def read(path: Path, image: Path, grid: Grid) -> np.ndarray:
    """Label map of the structures that `path` takes, on the grid of `image`. Shape: (X, Y, Z) int16.

    A voxel belongs to a structure if its centre lies inside an odd number of the contours of its slice, so
    that a contour inside another one is a hole. Of structures that overlap, the later one is above.
    Raises: ValueError: no RTSTRUCT, or one of another patient space; a structure that is not there, that has
        no closed contours, or whose contours are not in the slices of the image. Names file and structure.
    """
    file = choice_of(path)[0]
    pydicom = needed("pydicom", "dicom", "reading RTSTRUCT", file)
    with explained(f"{file}: cannot be read as RTSTRUCT"):
        content = pydicom.dcmread(file)
        rois = {int(roi.ROINumber): roi for roi in content.get("StructureSetROISequence") or ()}
        drawn = {int(c.ReferencedROINumber): c for c in content.get("ROIContourSequence") or ()}
    if content.get("Modality") != "RTSTRUCT":
        raise ValueError(f"{file}: expected RTSTRUCT for {_ROI}, got {content.get('Modality')}")
    label, space = np.zeros(grid.shape, np.int16), _space(pydicom, image)
    for value, wanted in enumerate(structures_of(path), 1):
        if not wanted:
            continue
        number = _number(file, wanted, rois)
        where = f"{file}: structure {rois[number].get('ROIName')!r}"
        its_space = rois[number].get("ReferencedFrameOfReferenceUID")
        if space and its_space and space != its_space:
            raise ValueError(f"{where} belongs to frame of reference {its_space}, but {image} to {space}")
        mask = _mask(where, _contours(where, drawn.get(number)), grid, image)
        if not mask.any():
            raise ValueError(f"{where}: no voxel of {image} has its centre inside the contours")
        label[mask] = value
    return label


def _number(file: Path, wanted: str, rois: dict[int, Any]) -> int:
    names = {number: str(roi.get("ROIName") or "").strip() for number, roi in rois.items()}
    accepted = [name.strip().lower() for name in wanted.split("|")]
    found = [number for number, name in names.items() if name.lower() in accepted]
    if len(found) != 1:
        there = ", ".join(map(repr, names.values())) or "none"
        raise ValueError(f"{file}: {len(found) or 'no'} structures are {wanted!r}; there are {there}")
    return found[0]


def _space(pydicom: Any, image: Path) -> str:
    """The frame of reference of a DICOM image; empty if it has none, as other formats."""
    if not is_dicom(image):
        return ""
    header = pydicom.dcmread(
        dicom.volumes(image)[0][0].path, specific_tags=["FrameOfReferenceUID"], force=True
    )
    return str(header.get("FrameOfReferenceUID") or "")


def _contours(where: str, drawn: Any) -> list[np.ndarray]:
    """Each once, (points, 3), in mm (right, anterior, superior)."""
    unique: dict[bytes, np.ndarray] = {}
    for contour in (drawn.get("ContourSequence") if drawn is not None else None) or ():
        if (kind := contour.get("ContourGeometricType")) not in _CLOSED:
            raise ValueError(f"{where} has a contour of type {kind}, expected {' or '.join(_CLOSED)}")
        with explained(f"{where} has a contour whose points are not triples of numbers"):
            points = np.array(contour.ContourData, np.float64).reshape(-1, 3) * (-1, -1, 1)
        if not np.isfinite(points).all():
            raise ValueError(f"{where} has a contour whose points are not finite")
        unique[points.tobytes()] = points
    if not unique:
        raise ValueError(f"{where} has no contour")
    return list(unique.values())


def _mask(where: str, contours: list[np.ndarray], grid: Grid, image: Path) -> np.ndarray:
    """(X, Y, Z) bool."""
    to_voxels = np.linalg.inv(grid.matrix).T
    places = [np.round((np.insert(c, 3, 1, axis=1) @ to_voxels)[:, :3], _DIGITS) for c in contours]
    axis = int(np.argmin(np.max([np.ptp(place, axis=0) for place in places], axis=0)))  # across the slices
    mask, by_slice = np.zeros(grid.shape, bool), defaultdict[int, list[np.ndarray]](list)
    slices = np.moveaxis(mask, axis, 0)
    for place in places:
        along, inside = place[:, axis], np.delete(place, axis, axis=1)
        z = int(np.rint(along.mean()))
        if (off := np.abs(along - z).max()) > _OFF_PLANE:
            raise ValueError(f"{where} has a contour {off:.2g} slices beside the slices of {image}")
        if (
            not 0 <= z < len(slices)
            or (inside.max(0) < -0.5).any()
            or (inside.min(0) > np.array(slices.shape[1:]) - 0.5).any()
        ):
            raise ValueError(f"{where} has a contour outside {image}")
        by_slice[z].append(inside)
    if len(by_slice) > 2 and (step := np.diff(sorted(by_slice)).min()) > 1:
        raise ValueError(f"{where} has contours {step} slices of {image} apart, expected one on each")
    for z, polygons in by_slice.items():
        slices[z] = _filled(polygons, slices.shape[1:])
    return mask


def _filled(polygons: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Even-odd rule at the middle of each voxel, for all polygons together.

    Shape: (points, 2) each -> `shape`.
    """
    edges = np.concatenate([np.stack([p, np.roll(p, -1, axis=0)], axis=1) for p in polygons])
    # One direction for all: the two ways along the seam of a keyhole cancel exactly
    low, high = np.take_along_axis(edges, np.argsort(edges[:, :, :1], axis=1), axis=1).transpose(1, 0, 2)
    return np.stack([_row(x, low, high, shape[1]) for x in range(shape[0])])


def _row(x: int, low: np.ndarray, high: np.ndarray, size: int) -> np.ndarray:
    crosses = (low[:, 0] <= x) & (x < high[:, 0])
    (x0, y0), (x1, y1) = low[crosses].T, high[crosses].T
    first = np.ceil(np.round(y0 + (x - x0) * (y1 - y0) / (x1 - x0), _DIGITS)).clip(0, size).astype(int)
    odd: np.ndarray = np.bincount(first, minlength=size + 1)[:size].cumsum() % 2 == 1
    return odd
