"""DICOM series as volumes: frames in spatial order, affine and voxel values.

Slices are sorted by their position along the normal of the slice plane, and their distance comes from these
positions; file names, instance numbers and SliceThickness are unreliable.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.dicom_headers import MARKS, Frame, choice_of
from medconv.data.io.dicom_series import frames_at
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

Volume = list[Frame]
_SAME_MM = 0.01  # positions closer than this are equal
_MAX_UNEVEN = 0.1  # largest deviation from an even grid, as share of the slice distance
_JPEG_12_BIT = "1.2.840.10008.1.2.4.51"  # GDCM and Pillow read it with 8 bits only
_ALIKE = {
    "modality": "Modality",
    "size": "columns and rows",
    "spacing_mm": "PixelSpacing (columns, rows)",
    "orientation": "ImageOrientationPatient",
}


def volumes(path: Path) -> list[Volume]:
    """The volumes of a series, frames sorted along the normal; several if positions repeat, as with b-values.

    Args: path: may end in `#2` or `#b=50`, which takes one of them, see `choice_of`.
    Raises: ValueError: not one series, not a volume, or not one that is chosen.
    """
    path, choice = choice_of(path)
    found = _all_volumes(path)
    return [_chosen(path, choice, found)] if choice else found


def _all_volumes(path: Path) -> list[Volume]:
    frames = frames_at(path)
    _check_alike(frames)
    if len(frames) == 1:
        return [list(frames)]
    groups = _by_position(frames)
    most, fewest = max(groups, key=len), min(groups, key=len)
    if len(most) > len(fewest):
        raise ValueError(
            f"{path}: {len(most)} slices at the position of {most[0].name}, {len(fewest)} at that of "
            f"{fewest[0].name}; expected the same number at each"
        )
    result = [[group[0] for group in groups]] if len(groups[0]) == 1 else _separate_volumes(path, groups)
    for volume in result:
        _check_even(path, volume)
    if any(not np.allclose(_positions(volume), _positions(result[0]), atol=_SAME_MM) for volume in result):
        raise ValueError(f"{path}: its {len(result)} volumes lie at different positions, expected one grid")
    return result


def affine(volume: Volume) -> np.ndarray:
    """4 x 4, from voxel (column, row, slice) to mm (right, anterior, superior), as in NIfTI.

    The step between slices comes from their positions: with a tilted gantry the affine is sheared.
    """
    first = volume[0]
    if first.spacing_mm is None:
        raise ValueError(f"{first.path}: has no PixelSpacing, so the voxel size in mm is unknown")
    lps = np.eye(4)
    row, column = np.reshape(first.orientation or (1, 0, 0, 0, 1, 0), (2, 3))
    lps[:3, 0], lps[:3, 1] = row * first.spacing_mm[0], column * first.spacing_mm[1]
    lps[:3, 2] = np.cross(row, column) * first.thickness_mm
    if first.position_mm is not None:
        positions = _positions(volume)
        lps[:3, 3] = positions[0]
        lps[:3, 2] = lps[:3, 2] if len(volume) == 1 else (positions[-1] - positions[0]) / (len(volume) - 1)
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ lps + 0.0  # no -0


def shape(volume: Volume) -> tuple[int, int, int]:
    return (*volume[0].size, len(volume))


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Rescaled values (slope and intercept of each slice), float32, and the affine.

    Shape: (columns, rows, slices); with repeated positions a last axis of volumes.
    Raises: ValueError: as `volumes`, or pixels that are missing, truncated, or without a decoder.
    """
    series = volumes(path)
    matrix = affine(series[0])
    array = np.empty((*shape(series[0]), len(series)), np.float32, order="F")
    by_file: dict[Path, list[tuple[Frame, int, int]]] = defaultdict(list)
    for v, volume in enumerate(series):
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
    return (array[..., 0] if len(series) == 1 else array), matrix


def _check_alike(frames: Sequence[Frame]) -> None:
    first, seen = frames[0], dict[tuple[str, int], Frame]()
    for frame in frames:
        for attribute, name in _ALIKE.items():
            value, expected = getattr(frame, attribute), getattr(first, attribute)
            if value != expected and (
                None in (value, expected)
                or isinstance(value, str)
                or not np.allclose(value, expected, atol=1e-4)
            ):
                raise ValueError(
                    f"{frame.path}: {name} {_text(value)}, but {_text(expected)} in {first.name}; expected "
                    "one value in a series"
                )
        if len(frames) > 1 and None in (frame.position_mm, frame.orientation):
            raise ValueError(
                f"{frame.path}: has no position (ImagePositionPatient, ImageOrientationPatient), expected "
                f"one in each of {len(frames)} slices"
            )
        if frame.uid and (other := seen.setdefault((frame.uid, frame.number), frame)) is not frame:
            raise ValueError(
                f"{frame.path}: the same image as {other.name} (SOPInstanceUID), expected it once"
            )
    pair = np.reshape(first.orientation or (1, 0, 0, 0, 1, 0), (2, 3))
    if not np.allclose(pair @ pair.T, np.eye(2), atol=1e-3):
        raise ValueError(
            f"{first.path}: ImageOrientationPatient {_text(first.orientation)}, expected unit vectors at a "
            "right angle"
        )


def _by_position(frames: Sequence[Frame]) -> list[Volume]:
    """Frames sorted along the normal, those with one position in one list."""
    row, column = np.array(frames[0].orientation, np.float64).reshape(2, 3)
    along = _positions(frames) @ np.cross(row, column)
    order = np.argsort(along, kind="stable")
    starts = np.flatnonzero(np.diff(along[order]) > _SAME_MM) + 1
    return [[frames[i] for i in group] for group in np.split(order, starts)]


def _separate_volumes(path: Path, groups: list[Volume]) -> list[Volume]:
    """Volumes by the first of `MARKS` that has the same values at each position, each once."""
    for mark in range(len(MARKS)):
        tables: list[dict[Any, Frame]] = [{frame.marks[mark]: frame for frame in group} for group in groups]
        values = set(tables[0])
        complete = len(values) == len(groups[0]) and all(table.keys() == values for table in tables)
        if complete and None not in values:
            return [[table[value] for table in tables] for value in sorted(values, key=_order)]
    names = " and ".join(frame.name for frame in groups[0][:2])
    raise ValueError(
        f"{path}: {len(groups[0])} slices at each position, such as {names}, and no header separates them; "
        f"expected one, or different values of one of {', '.join(MARKS)}"
    )


def _order(mark: float | str) -> tuple[bool, float | str]:
    """Numbers first: several values in one element are a text."""
    return isinstance(mark, str), mark


def _chosen(path: Path, choice: str, series: list[Volume]) -> Volume:
    """Args: choice: `#2`, counted from 1, or `#b=50`."""
    if choice.startswith("#roi="):
        raise ValueError(f"{path}: {choice} takes structures of an RTSTRUCT file, a label; expected an image")
    name, marks = choice[1:], [volume[0].marks for volume in series]
    if name.startswith("b="):
        found = [volume for volume, (b, *_) in zip(series, marks, strict=True) if b == float(name[2:])]
    else:
        found = [volume for number, volume in enumerate(series, 1) if number == int(name)]
    if len(found) == 1:
        return found[0]
    differing = [mark for mark, column in enumerate(zip(*marks, strict=True)) if len({*column}) > 1][:2]
    there = [
        " ".join([f"#{number}", *(f"{MARKS[mark]} {_text(values[mark])}" for mark in differing)])
        for number, values in enumerate(marks, 1)
    ]
    raise ValueError(f"{path}: {len(found) or 'no'} volumes are {choice}; there are {', '.join(there)}")


def _check_even(path: Path, volume: Volume) -> None:
    """Raises: ValueError: the slices do not lie on a line in even steps."""
    if len(volume) < 2:
        return
    positions = _positions(volume)
    even = np.linspace(positions[0], positions[-1], len(volume))
    step = np.linalg.norm(even[1] - even[0])
    if np.linalg.norm(positions - even, axis=1).max() > _MAX_UNEVEN * step:
        gaps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
        widest, usual = int(gaps.argmax()), np.median(gaps)
        raise ValueError(
            f"{path}: slices are missing or out of line: {gaps[widest]:.4g} mm from {volume[widest].name} to "
            f"{volume[widest + 1].name}, {usual:.4g} mm between most; expected even steps along one line"
        )


def _pixels(path: Path) -> np.ndarray:
    """As stored, (frames, rows, columns)."""
    pydicom = needed("pydicom", "dicom", "reading DICOM", path)
    with explained(f"{path}: damaged or truncated, its pixels cannot be read"):
        content = pydicom.dcmread(path, force=True)
        if "TransferSyntaxUID" not in content.file_meta:  # no preamble; its elements show the encoding
            implicit, uids = content.original_encoding[0], pydicom.uid
            syntax = uids.ImplicitVRLittleEndian if implicit else uids.ExplicitVRLittleEndian
            content.file_meta.TransferSyntaxUID = syntax
        if not (problem := _pixel_problem(content)):
            array = content.pixel_array
            return array.reshape(-1, *array.shape[-2:])  # type: ignore[no-any-return]
    raise ValueError(f"{path}: {problem}")


def _pixel_problem(content: Any) -> str:
    """Why the pixels cannot be decoded; empty if they can."""
    from pydicom.pixels import get_decoder

    if not any(f"{kind}PixelData" in content for kind in ("", "Float", "DoubleFloat")):
        return "has no pixels (7FE0,0010), expected an image"
    syntax = content.file_meta.TransferSyntaxUID
    if syntax == _JPEG_12_BIT and content.BitsStored > 8 and find_spec("libjpeg") is None:
        decoder = "pip install pylibjpeg pylibjpeg-libjpeg (GPL) installs a decoder"
        return f"compressed as {syntax.name} with {content.BitsStored} bits; {decoder}"
    with suppress(NotImplementedError):  # pydicom knows no decoder for it, such as MPEG
        if not syntax.is_compressed or get_decoder(syntax).is_available:
            return ""
    return (
        f"compressed as {syntax.name}, and no decoder for it is installed; pip install 'medconv[dicom]' "
        "installs those of JPEG, JPEG-LS and JPEG 2000"
    )


def _scaled(frame: Frame, pixels: np.ndarray) -> np.ndarray:
    if frame.white is not None:
        return frame.white - pixels.astype(np.float64)
    return pixels if (frame.slope, frame.intercept) == (1, 0) else pixels * frame.slope + frame.intercept


def _positions(frames: Sequence[Frame]) -> np.ndarray:
    return np.array([frame.position_mm for frame in frames], np.float64)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "(" + ", ".join(f"{v:.6g}" for v in value) + ")" if isinstance(value, tuple) else repr(value)
