"""Label maps from RTSTRUCT, the contours of radiotherapy: `rs.dcm#roi=heart;lung` are the labels 1 and 2."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.formats import choice_of, structures_of
from medconv.features.dicom import volumes
from medconv.features.dicom.files import is_dicom
from medconv.utils.errors import explained
from medconv.utils.logging import some
from medconv.utils.optional_imports import needed

_ROI = "#roi="  # as in messages
_MAX_OFF_PLANE = 0.1  # slices by which a contour may lie beside the middle of its slice
_DIGITS = 4  # of a position in voxels; headers give positions as decimals
_CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


class _Structure(NamedTuple):
    """A structure on the grid of its image.

    Args:
        value: in the label map.
        location: file and name, for messages.
        slice_axis: along which no contour has an extent.
        polygons: slice to its contours, (points, 2) each, in voxels.
    """

    value: int
    location: str
    slice_axis: int
    polygons: dict[int, list[np.ndarray]]


def read(path: Path, image: Path, grid: Grid) -> np.ndarray:
    """Label map of the structures that `path` takes, on the grid of `image`.

    A voxel belongs to a structure if its centre lies inside an odd number of the contours of its slice, so
    that a contour inside another one is a hole. Where structures overlap, the later one counts.

    Shape: (X, Y, Z) int16.

    Args:
        path: an RTSTRUCT file with its structures, see `structures_of`.
        image: a DICOM image is checked to have the same frame of reference.
        grid: of the image.

    Raises:
        ValueError: no RTSTRUCT, or one of another patient space; a structure that is not there, that has no
            closed contours, or whose contours are not in the slices of the image. Names file and structure.
    """
    label = np.zeros(grid.shape, np.int16)
    for structure in _structures(path, image, grid):
        mask = _mask(structure, grid)
        if not mask.any():
            raise ValueError(f"{structure.location}: no voxel of {image} has its centre inside the contours")
        label[mask] = structure.value
    return label


def missing_slices(path: Path, image: Path, grid: Grid) -> list[str]:
    """A warning for each structure that lacks contours of slices between two that have some.

    They may have been forgotten; or the structure has two parts. Of several slices, it has if the contours
    before and behind the gap lie beside each other.

    Args:
        path, image, grid: as for `read`.

    Raises:
        ValueError: as `read`.
    """
    warnings = []
    for structure in _structures(path, image, grid):
        gaps = list(_gaps(structure.polygons))
        if gaps:
            warnings.append(
                f"{structure.location} has no contour on slice {some(gaps)} (from 0) of {image}, but on both "
                "beside it; if it was forgotten, draw it: its voxels are background"
            )
    return warnings


def _gaps(polygons: Mapping[int, Sequence[np.ndarray]]) -> Iterator[str]:
    """Such as `2` and `5 to 9`. Args: polygons: as in `_Structure`."""
    for before, behind in pairwise(sorted(polygons)):
        first = before + 1
        last = behind - 1
        if first == last:
            yield str(first)
        elif first < last and _overlap(polygons[before], polygons[behind]):
            yield f"{first} to {last}"


def _overlap(polygons: Sequence[np.ndarray], compared: Sequence[np.ndarray]) -> bool:
    """Whether the boxes around the polygons of two slices overlap. Shape: (points, 2) each."""
    points = np.concatenate(polygons)
    compared_points = np.concatenate(compared)
    begin = np.maximum(points.min(axis=0), compared_points.min(axis=0))
    end = np.minimum(points.max(axis=0), compared_points.max(axis=0))
    return bool((begin < end).all())


def _structures(path: Path, image: Path, grid: Grid) -> Iterator[_Structure]:
    """The structures that a path takes. Raises: ValueError: as `read`."""
    file, _ = choice_of(path)
    pydicom = needed("pydicom", "dicom", "reading RTSTRUCT", file)
    with explained(f"{file}: cannot be read as RTSTRUCT"):
        content = pydicom.dcmread(file)
        rois = {int(roi.ROINumber): roi for roi in content.get("StructureSetROISequence") or ()}
        contour_sets = content.get("ROIContourSequence") or ()
        contours_by_roi = {int(contours.ReferencedROINumber): contours for contours in contour_sets}
    if content.get("Modality") != "RTSTRUCT":
        raise ValueError(f"{file}: expected RTSTRUCT for {_ROI}, got {content.get('Modality')}")
    image_space = _frame_of_reference(pydicom, image)
    for value, names in enumerate(structures_of(path), 1):
        if not names:
            continue
        number = structure_number(
            file, names, {number: str(roi.get("ROIName") or "") for number, roi in rois.items()}
        )
        location = f"{file}: structure {rois[number].get('ROIName')!r}"
        _check_space(location, rois[number], image, image_space)
        contours = _contour_points(location, contours_by_roi.get(number))
        yield _in_slices(value, location, contours, grid, image)


def structure_number(file: Path, names: str, available: Mapping[int, str]) -> int:
    """The number of the structure with one of these names.

    Args:
        file: for messages.
        names: such as `Heart|Herz`.
        available: number to name.

    Raises: ValueError: not exactly one.
    """
    accepted = [name.strip().lower() for name in names.split("|")]
    matches = [number for number, name in available.items() if name.strip().lower() in accepted]
    if len(matches) != 1:
        listed = ", ".join(repr(name.strip()) for name in available.values()) or "none"
        raise ValueError(f"{file}: {len(matches) or 'no'} structures are {names!r}; there are {listed}")
    return matches[0]


def _frame_of_reference(pydicom: Any, image: Path) -> str:
    """The patient space (UID) of a DICOM image; empty if it has none, as other formats."""
    if not is_dicom(image):
        return ""
    first_frame = volumes.volumes(image)[0][0]
    header = pydicom.dcmread(first_frame.path, specific_tags=["FrameOfReferenceUID"], force=True)
    return str(header.get("FrameOfReferenceUID") or "")


def _check_space(location: str, roi: Any, image: Path, image_space: str) -> None:
    """Raises: ValueError: structure and image are known to belong to different patient spaces."""
    roi_space = roi.get("ReferencedFrameOfReferenceUID")
    if image_space and roi_space and image_space != roi_space:
        raise ValueError(
            f"{location} belongs to frame of reference {roi_space}, but {image} to {image_space}"
        )


def _contour_points(location: str, roi_contours: Any) -> list[np.ndarray]:
    """The contours of a structure, each once. Shape: (points, 3) each, in mm (right, anterior, superior).

    Raises: ValueError: no contour, an open one, or one without usable points.
    """
    sequence = roi_contours.get("ContourSequence") if roi_contours is not None else None
    unique: dict[bytes, np.ndarray] = {}
    for contour in sequence or ():
        kind = contour.get("ContourGeometricType")
        if kind not in _CLOSED:
            raise ValueError(f"{location} has a contour of type {kind}, expected {' or '.join(_CLOSED)}")
        with explained(f"{location} has a contour whose points are not triples of numbers"):
            lps = np.array(contour.ContourData, np.float64).reshape(-1, 3)
        points = lps * (-1, -1, 1)
        if not np.isfinite(points).all():
            raise ValueError(f"{location} has a contour whose points are not finite")
        unique[points.tobytes()] = points
    if not unique:
        raise ValueError(f"{location} has no contour")
    return list(unique.values())


def _in_slices(value: int, location: str, contours: list[np.ndarray], grid: Grid, image: Path) -> _Structure:
    """A structure in voxels. Shape: contours (points, 3) each, in mm."""
    to_voxels = np.linalg.inv(grid.matrix).T
    contours_in_voxels = []
    for points in contours:
        homogeneous = np.insert(points, 3, 1, axis=1)
        contours_in_voxels.append(np.round((homogeneous @ to_voxels)[:, :3], _DIGITS))
    # Contours are planar, so along the slice axis none has an extent
    extents = [np.ptp(points, axis=0) for points in contours_in_voxels]
    slice_axis = int(np.argmin(np.max(extents, axis=0)))
    num_slices = grid.shape[slice_axis]
    last_voxel = np.delete(grid.shape, slice_axis) - 1
    polygons_by_slice: dict[int, list[np.ndarray]] = defaultdict(list)
    for points in contours_in_voxels:
        slice_index = _slice_index(location, points[:, slice_axis], image)
        polygon = np.delete(points, slice_axis, axis=1)
        # A voxel reaches half a voxel beyond its centre
        is_beside = (polygon.max(0) < -0.5).any() or (polygon.min(0) > last_voxel + 0.5).any()
        if not 0 <= slice_index < num_slices or is_beside:
            raise ValueError(f"{location} has a contour outside {image}")
        polygons_by_slice[slice_index].append(polygon)
    _check_no_gaps(location, sorted(polygons_by_slice), image)
    return _Structure(value, location, slice_axis, polygons_by_slice)


def _mask(structure: _Structure, grid: Grid) -> np.ndarray:
    """Voxels of a structure. Shape: (X, Y, Z) bool."""
    mask = np.zeros(grid.shape, bool)
    slices = np.moveaxis(mask, structure.slice_axis, 0)  # a view
    for slice_index, polygons in structure.polygons.items():
        slices[slice_index] = _filled(polygons, slices.shape[1:])
    return mask


def _slice_index(location: str, positions: np.ndarray, image: Path) -> int:
    """The slice of a contour.

    Args:
        location: for messages.
        positions: of its points along the slice axis, in voxels.
        image: for messages.

    Raises: ValueError: the contour lies between slices.
    """
    slice_index = int(np.rint(positions.mean()))
    distance = np.abs(positions - slice_index).max()
    if distance > _MAX_OFF_PLANE:
        raise ValueError(f"{location} has a contour {distance:.2g} slices beside the slices of {image}")
    return slice_index


def _check_no_gaps(location: str, slice_indices: Sequence[int], image: Path) -> None:
    """Raises: ValueError: contours are on every second slice, or fewer, as if drawn on another image."""
    if len(slice_indices) <= 2:
        return
    step = np.diff(slice_indices).min()
    if step > 1:
        raise ValueError(f"{location} has contours {step} slices of {image} apart, expected one on each")


def _filled(polygons: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Even-odd rule at the middle of each voxel, for all polygons together.

    Shape: (points, 2) each -> `shape`, bool.
    """
    edges = np.concatenate([np.stack([points, np.roll(points, -1, axis=0)], axis=1) for points in polygons])
    # One direction for all edges: the two ways along the seam of a keyhole cancel exactly
    by_first_axis = np.argsort(edges[:, :, :1], axis=1)
    low, high = np.take_along_axis(edges, by_first_axis, axis=1).transpose(1, 0, 2)
    filled = np.zeros(shape, bool)
    for x in range(max(0, ceil(low[:, 0].min())), min(shape[0], ceil(high[:, 0].max()))):
        filled[x] = _filled_line(x, low, high, shape[1])
    return filled


def _filled_line(x: int, low: np.ndarray, high: np.ndarray, size: int) -> np.ndarray:
    """Voxels inside the polygons on the line of one x.

    Args:
        x: position along the first axis, in voxels.
        low: ends of all edges with the smaller x, (edges, 2).
        high: ends with the larger x.
        size: voxels along the second axis.
    """
    crosses = (low[:, 0] <= x) & (x < high[:, 0])
    x0, y0 = low[crosses].T
    x1, y1 = high[crosses].T
    crossings = np.round(y0 + (x - x0) * (y1 - y0) / (x1 - x0), _DIGITS)
    # From a crossing on, inside and outside change
    first_voxels = np.ceil(crossings).clip(0, size).astype(int)
    num_crossings = np.bincount(first_voxels, minlength=size + 1)[:size].cumsum()
    is_inside: np.ndarray = num_crossings % 2 == 1
    return is_inside
