"""DICOM series as volumes: frames in their order, the affine that follows, and the values.

Slices are sorted by their place along the normal of their plane, and are as far apart as their places are:
file names, instance numbers and SliceThickness say neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.dicom_headers import MARKS, Frame
from medconv.data.io.dicom_series import frames_at
from medconv.utils.optional_imports import needed

Volume = list[Frame]
_SAME_MM = 0.01  # places this close are one
_UNEVEN = 0.1  # of the distance between slices: how far one may lie from its place on an even grid
_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
_ALIKE = {
    "modality": "Modality",
    "size": "columns and rows",
    "spacing_mm": "PixelSpacing (columns, rows)",
    "orientation": "ImageOrientationPatient",
}


def volumes(path: Path) -> list[Volume]:
    """The volumes of a series, one unless places repeat, as with b-values; frames of each along the normal.

    Raises: ValueError: not one series, or one that makes no volume; file and expectation are named.
    """
    frames = frames_at(path)
    _check_alike(frames)
    if len(frames) == 1:
        return [list(frames)]
    places = _places(frames)
    if len({len(place) for place in places}) > 1:
        raise ValueError(_repeated(path, max(places, key=len), min(places, key=len)))
    found = [[place[0] for place in places]] if len(places[0]) == 1 else _told_apart(path, places)
    for volume in found:
        _check_even(path, volume)
    if any(not np.allclose(_positions(volume), _positions(found[0]), atol=_SAME_MM) for volume in found):
        raise ValueError(
            f"{path}: its {len(found)} volumes lie at different places in their planes, expected one grid"
        )
    return found


def affine(volume: Volume) -> np.ndarray:
    """4 x 4, from voxel (column, row, slice) to mm (right, anterior, superior), as NIfTI counts.

    The step from slice to slice is the one between their places: of a tilted gantry it is oblique, and the
    affine sheared.
    """
    first = volume[0]
    if first.spacing_mm is None:
        raise ValueError(f"{first.path}: has no PixelSpacing, which gives its voxels a size in mm")
    lps = np.eye(4)
    row, column = np.reshape(first.orientation or (1, 0, 0, 0, 1, 0), (2, 3))
    lps[:3, 0], lps[:3, 1] = row * first.spacing_mm[0], column * first.spacing_mm[1]
    lps[:3, 2] = np.cross(row, column) * first.thickness_mm
    if first.position_mm is not None:
        places = _positions(volume)
        lps[:3, 3] = places[0]
        lps[:3, 2] = lps[:3, 2] if len(volume) == 1 else (places[-1] - places[0]) / (len(volume) - 1)
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ lps + 0.0  # no -0


def shape(volume: Volume) -> tuple[int, int, int]:
    return (*volume[0].size, len(volume))


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Values as the modality means them (slope and intercept of each slice), float32, and the affine.

    Shape: (columns, rows, slices), and where places repeat a last axis of volumes.
    Raises: ValueError: as `volumes`, or pixels that lack, are cut short, or need a decoder that is not there.
    """
    found = volumes(path)
    matrix = affine(found[0])
    array = np.empty((*shape(found[0]), len(found)), np.float32, order="F")
    by_file: dict[Path, list[tuple[Frame, int, int]]] = defaultdict(list)
    for v, volume in enumerate(found):
        for z, frame in enumerate(volume):
            by_file[frame.path].append((frame, z, v))
    for file, frames in by_file.items():
        pixels = _pixels(file)
        for frame, z, v in frames:
            if pixels[0].T.shape != frame.size or frame.number >= len(pixels):
                raise ValueError(
                    f"{file}: its pixels are {pixels.shape}, expected frames of {frame.size[::-1]} as in its "
                    "header"
                )
            array[:, :, z, v] = _scaled(frame, pixels[frame.number]).T
    return (array[..., 0] if len(found) == 1 else array), matrix


def _check_alike(frames: Sequence[Frame]) -> None:
    first, seen = frames[0], dict[tuple[str, int], Frame]()
    for frame in frames:
        for attribute, name in _ALIKE.items():
            here, there = getattr(frame, attribute), getattr(first, attribute)
            if here != there and (
                None in (here, there) or isinstance(here, str) or not np.allclose(here, there, atol=1e-4)
            ):
                raise ValueError(
                    f"{frame.path}: {name} {_said(here)}, but {_said(there)} in {first.name}; expected a "
                    "series to be alike"
                )
        if len(frames) > 1 and None in (frame.position_mm, frame.orientation):
            raise ValueError(
                f"{frame.path}: has no place (ImagePositionPatient, ImageOrientationPatient), expected one "
                f"in each of {len(frames)} slices"
            )
        if frame.uid and (other := seen.setdefault((frame.uid, frame.number), frame)) is not frame:
            raise ValueError(
                f"{frame.path}: the same image as {other.name} (SOPInstanceUID), expected it once"
            )
    _check_directions(first)


def _check_directions(frame: Frame) -> None:
    if frame.orientation is not None:
        pair = np.reshape(frame.orientation, (2, 3))
        if not np.allclose(pair @ pair.T, np.eye(2), atol=1e-3):
            raise ValueError(
                f"{frame.path}: ImageOrientationPatient {_said(frame.orientation)}, expected unit vectors at "
                "a right angle"
            )


def _places(frames: Sequence[Frame]) -> list[Volume]:
    """Frames along the normal, those of one place together."""
    row, column = np.array(frames[0].orientation, np.float64).reshape(2, 3)
    along = _positions(frames) @ np.cross(row, column)
    order = np.argsort(along, kind="stable")
    starts = [
        0,
        *(i for i in range(1, len(order)) if along[order[i]] - along[order[i - 1]] > _SAME_MM),
        len(order),
    ]
    return [[frames[i] for i in order[a:b]] for a, b in pairwise(starts)]


def _told_apart(path: Path, places: list[Volume]) -> list[Volume]:
    """Volumes in the order of the first mark that has the same values at each place, each once."""
    for mark in range(len(MARKS)):
        tables: list[dict[Any, Frame]] = [{frame.marks[mark]: frame for frame in place} for place in places]
        values = set(tables[0])
        if (
            None not in values
            and len(values) == len(places[0])
            and all(set(table) == values for table in tables)
        ):
            return [[table[value] for table in tables] for value in sorted(values)]
    names = " and ".join(frame.name for frame in places[0][:2])
    raise ValueError(
        f"{path}: {len(places[0])} slices at each place, such as {names}, and nothing tells them apart; "
        f"expected one, or different values of one of {', '.join(MARKS)}"
    )


def _repeated(path: Path, most: Volume, fewest: Volume) -> str:
    return (
        f"{path}: {len(most)} slices at the place of {most[0].name}, {len(fewest)} at that of "
        f"{fewest[0].name}; expected as many at each"
    )


def _check_even(path: Path, volume: Volume) -> None:
    """Raises: ValueError: some slice lies elsewhere than on the line from the first to the last, in even
    steps.
    """
    if len(volume) < 3:
        return
    places = _positions(volume)
    even = np.linspace(places[0], places[-1], len(volume))
    step = np.linalg.norm(even[1] - even[0])
    if np.linalg.norm(places - even, axis=1).max() <= _UNEVEN * step:
        return
    gaps = np.linalg.norm(np.diff(places, axis=0), axis=1)
    widest, usual = int(gaps.argmax()), float(np.median(gaps))
    raise ValueError(
        f"{path}: slices are missing or out of line: {gaps[widest]:.4g} mm from {volume[widest].name} to "
        f"{volume[widest + 1].name}, {usual:.4g} mm between most; expected even steps along one line"
    )


def _pixels(path: Path) -> np.ndarray:
    """As stored, (frames, rows, columns)."""
    pydicom = needed("pydicom", "dicom", "reading DICOM", path)
    try:
        content = pydicom.dcmread(path)
        lacking = _lacking(content)
        array = None if lacking else content.pixel_array
    except Exception as error:  # damaged files make pydicom and its decoders raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: damaged or truncated, its pixels cannot be read ({said})") from error
    if array is None:
        raise ValueError(f"{path}: {lacking}")
    return array.reshape(-1, *array.shape[-2:])  # type: ignore[no-any-return]


def _lacking(content: Any) -> str:
    from pydicom.pixels import get_decoder

    if not any(name in content for name in _PIXELS):
        return "has no pixels (7FE0,0010), expected an image"
    syntax = content.file_meta.TransferSyntaxUID
    try:
        if not syntax.is_compressed or get_decoder(syntax).is_available:
            return ""
    except NotImplementedError:  # one that pydicom knows no decoder of, such as MPEG
        pass
    return (
        f"compressed as {syntax.name}, which no decoder here reads; pip install 'medconv[dicom]' brings "
        "those of JPEG, JPEG-LS and JPEG 2000"
    )


def _scaled(frame: Frame, pixels: np.ndarray) -> np.ndarray:
    if frame.white is not None:
        return frame.white - pixels.astype(np.float64)
    return pixels if (frame.slope, frame.intercept) == (1, 0) else pixels * frame.slope + frame.intercept


def _positions(frames: Sequence[Frame]) -> np.ndarray:
    return np.array([frame.position_mm for frame in frames], np.float64)


def _said(value: Any) -> str:
    return "(" + ", ".join(f"{v:.6g}" for v in value) + ")" if isinstance(value, tuple) else repr(value)
