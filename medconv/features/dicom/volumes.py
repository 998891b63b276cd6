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

from medconv.data.io.formats import choice_of
from medconv.data.io.nifti import check_memory
from medconv.features.dicom.headers import MARKS, Frame
from medconv.features.dicom.series import frames_at
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

Volume = list[Frame]
# Positions closer than this are equal, or than a tenth of a pixel, which may be 9 micrometres
_SAME_POSITION_MM = 0.01
_MAX_UNEVEN = 0.1  # largest deviation from an even grid, as share of the slice distance
_JPEG_12_BIT = "1.2.840.10008.1.2.4.51"  # GDCM and Pillow read it with 8 bits only
_AXIAL = (1, 0, 0, 0, 1, 0)  # orientation of projections, which have none
# Attributes of `Frame` that all slices share, and their names in messages
_SHARED_ATTRIBUTES = {
    "modality": "Modality",
    "size": "columns and rows",
    "spacing_mm": "PixelSpacing (columns, rows)",
    "orientation": "ImageOrientationPatient",
}


def volumes(path: Path) -> list[Volume]:
    """The volumes of a series, frames sorted along the normal; several if positions repeat, as with b-values.

    Args:
        path: may end in `#2` or `#b=50`, which takes one of them, see `choice_of`.

    Raises:
        ValueError: not one series, not a volume, or not one that is chosen.
    """
    path, choice = choice_of(path)
    all_volumes = _all_volumes(path)
    return [_chosen(path, choice, all_volumes)] if choice else all_volumes


def _all_volumes(path: Path) -> list[Volume]:
    frames = frames_at(path)
    _check_alike(frames)
    if len(frames) == 1:
        return [list(frames)]
    positions = _by_position(frames)
    _check_same_count(path, positions)
    if len(positions[0]) == 1:
        series = [[frames_here[0] for frames_here in positions]]
    else:
        series = _separate_volumes(path, positions)
    for volume in series:
        _check_even(path, volume)
    first_positions = _positions_mm(series[0])
    for volume in series:
        if not np.allclose(_positions_mm(volume), first_positions, atol=_SAME_POSITION_MM):
            raise ValueError(
                f"{path}: its {len(series)} volumes lie at different positions, expected one grid"
            )
    return series


def affine(volume: Volume) -> np.ndarray:
    """4 x 4, from voxel (column, row, slice) to mm (right, anterior, superior), as in NIfTI.

    The step between slices comes from their positions: with a tilted gantry the affine is sheared.

    Raises:
        ValueError: without PixelSpacing.
    """
    first = volume[0]
    if first.spacing_mm is None:
        raise ValueError(f"{first.path}: has no PixelSpacing, so the voxel size in mm is unknown")
    along_row, along_column = np.reshape(first.orientation or _AXIAL, (2, 3))
    lps = np.eye(4)  # to left, posterior, superior
    lps[:3, 0] = along_row * first.spacing_mm[0]
    lps[:3, 1] = along_column * first.spacing_mm[1]
    lps[:3, 2] = np.cross(along_row, along_column) * first.thickness_mm
    if first.position_mm is not None:
        positions = _positions_mm(volume)
        lps[:3, 3] = positions[0]
        if len(volume) > 1:
            lps[:3, 2] = (positions[-1] - positions[0]) / (len(volume) - 1)
    ras_from_lps = np.diag([-1.0, -1.0, 1.0, 1.0])
    return ras_from_lps @ lps + 0.0  # turns -0 into 0


def shape(volume: Volume) -> tuple[int, int, int]:
    """Columns, rows and slices."""
    columns, rows = volume[0].size
    return columns, rows, len(volume)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Rescaled values (slope and intercept of each slice), float32, and the affine.

    Shape: (columns, rows, slices); with repeated positions a last axis of volumes.

    Raises:
        ValueError: as `volumes`, or pixels that are missing, truncated, or without a decoder.
    """
    series = volumes(path)
    matrix = affine(series[0])
    check_memory(series[0][0].path, (*shape(series[0]), len(series)))
    # In the order of the slices, each of which is then one block of memory
    array = np.empty((*shape(series[0]), len(series)), np.float32, order="F")
    # Each file is decoded once; an enhanced one has many frames
    by_file: dict[Path, list[tuple[Frame, int, int]]] = defaultdict(list)
    for volume_index, volume in enumerate(series):
        for slice_index, frame in enumerate(volume):
            by_file[frame.path].append((frame, slice_index, volume_index))
    for file, frames in by_file.items():
        pixels = _pixels(file)
        for frame, slice_index, volume_index in frames:
            _check_pixels(frame, pixels)
            array[:, :, slice_index, volume_index] = _rescaled(frame, pixels[frame.number]).T
    if len(series) == 1:
        array = array[..., 0]
    return array, matrix


def _check_alike(frames: Sequence[Frame]) -> None:
    """Raises: ValueError: headers that differ within a series, or slices without positions or there twice."""
    first = frames[0]
    first_with_uid: dict[tuple[str, int], Frame] = {}
    for frame in frames:
        _check_shared_attributes(frame, first)
        if len(frames) > 1 and (frame.position_mm is None or frame.orientation is None):
            raise ValueError(
                f"{frame.path}: has no position (ImagePositionPatient, ImageOrientationPatient), "
                f"expected one in each of {len(frames)} slices"
            )
        if frame.uid:
            same_image = first_with_uid.setdefault((frame.uid, frame.number), frame)
            if same_image is not frame:
                raise ValueError(
                    f"{frame.path}: the same image as {same_image.name} (SOPInstanceUID), expected it once"
                )
    directions = np.reshape(first.orientation or _AXIAL, (2, 3))
    if not np.allclose(directions @ directions.T, np.eye(2), atol=1e-3):
        raise ValueError(
            f"{first.path}: ImageOrientationPatient {_text(first.orientation)}, "
            "expected unit vectors at a right angle"
        )


def _check_shared_attributes(frame: Frame, first: Frame) -> None:
    """Raises: ValueError: an attribute differs from that of the first frame of the series."""
    for attribute, header_name in _SHARED_ATTRIBUTES.items():
        value = getattr(frame, attribute)
        expected = getattr(first, attribute)
        if value == expected:
            continue
        are_numbers = value is not None and expected is not None and not isinstance(value, str)
        if are_numbers and np.allclose(value, expected, atol=1e-4):
            continue
        raise ValueError(
            f"{frame.path}: {header_name} {_text(value)}, but {_text(expected)} in {first.name}; "
            "expected one value in a series"
        )


def _by_position(frames: Sequence[Frame]) -> list[Volume]:
    """Frames sorted along the normal, those with one position in one list."""
    along_row, along_column = np.array(frames[0].orientation, np.float64).reshape(2, 3)
    distance_mm = _positions_mm(frames) @ np.cross(along_row, along_column)
    order = np.argsort(distance_mm, kind="stable")
    steps = np.diff(distance_mm[order])
    same_mm = min([_SAME_POSITION_MM, *(0.1 * mm for mm in frames[0].spacing_mm or ())])
    starts = np.flatnonzero(steps > same_mm) + 1
    return [[frames[index] for index in indices] for indices in np.split(order, starts)]


def _check_same_count(path: Path, positions: list[Volume]) -> None:
    """Raises: ValueError: some position has more frames than another."""
    longest = max(positions, key=len)
    shortest = min(positions, key=len)
    if len(longest) > len(shortest):
        raise ValueError(
            f"{path}: {len(longest)} slices at the position of {longest[0].name}, "
            f"{len(shortest)} at that of {shortest[0].name}; expected the same number at each"
        )


def _separate_volumes(path: Path, positions: list[Volume]) -> list[Volume]:
    """Volumes by the first of `MARKS` that has the same values at each position, each once."""
    num_volumes = len(positions[0])
    for mark in range(len(MARKS)):
        # For each position, value of the mark to frame
        tables: list[dict[Any, Frame]] = []
        for frames_here in positions:
            tables.append({frame.marks[mark]: frame for frame in frames_here})
        values = set(tables[0])
        is_same_everywhere = all(table.keys() == values for table in tables)
        if len(values) == num_volumes and is_same_everywhere and None not in values:
            ordered = sorted(values, key=_sort_key)
            return [[table[value] for table in tables] for value in ordered]
    names = " and ".join(frame.name for frame in positions[0][:2])
    raise ValueError(
        f"{path}: {num_volumes} slices at each position, such as {names}, and no header separates them; "
        f"expected one, or different values of one of {', '.join(MARKS)}"
    )


def _sort_key(mark: float | str) -> tuple[bool, float | str]:
    """Numbers first: several values in one element are a text."""
    return isinstance(mark, str), mark


def _chosen(path: Path, choice: str, series: list[Volume]) -> Volume:
    """The volume of a choice: `#2`, counted from 1, or `#b=50`."""
    if choice.startswith("#roi="):
        raise ValueError(f"{path}: {choice} takes structures of an RTSTRUCT file, a label; expected an image")
    name = choice.removeprefix("#")
    if name.startswith("b="):
        b_value = float(name.removeprefix("b="))
        matches = [volume for volume in series if volume[0].marks[0] == b_value]
    else:
        matches = [volume for number, volume in enumerate(series, 1) if number == int(name)]
    if len(matches) == 1:
        return matches[0]
    raise ValueError(
        f"{path}: {len(matches) or 'no'} volumes are {choice}; there are {_descriptions(series)}"
    )


def _descriptions(series: list[Volume]) -> str:
    """The volumes by their number, with the first two marks in which they differ."""
    marks_by_volume = [volume[0].marks for volume in series]
    differing = []
    for mark, values in enumerate(zip(*marks_by_volume, strict=True)):
        if len(set(values)) > 1:
            differing.append(mark)
    descriptions = []
    for number, marks in enumerate(marks_by_volume, 1):
        texts = [f"{MARKS[mark]} {_text(marks[mark])}" for mark in differing[:2]]
        descriptions.append(" ".join([f"#{number}", *texts]))
    return ", ".join(descriptions)


def _check_even(path: Path, volume: Volume) -> None:
    """Raises: ValueError: the slices do not lie on a line in even steps."""
    if len(volume) < 2:
        return
    positions = _positions_mm(volume)
    even = np.linspace(positions[0], positions[-1], len(volume))
    step_mm = np.linalg.norm(even[1] - even[0])
    deviation_mm = np.linalg.norm(positions - even, axis=1)
    if deviation_mm.max() > _MAX_UNEVEN * step_mm:
        gaps_mm = np.linalg.norm(np.diff(positions, axis=0), axis=1)
        widest = int(gaps_mm.argmax())
        raise ValueError(
            f"{path}: slices are missing or out of line: {gaps_mm[widest]:.4g} mm from "
            f"{volume[widest].name} to {volume[widest + 1].name}, {np.median(gaps_mm):.4g} mm between most; "
            "expected even steps along one line"
        )


def _pixels(path: Path) -> np.ndarray:
    """Stored values. Shape: (frames, rows, columns).

    Raises: ValueError: damaged, or without a decoder.
    """
    pydicom = needed("pydicom", "dicom", "reading DICOM", path)
    with explained(f"{path}: damaged or truncated, its pixels cannot be read"):
        content = pydicom.dcmread(path, force=True)
        if "TransferSyntaxUID" not in content.file_meta:  # no preamble; its elements show the encoding
            is_implicit = content.original_encoding[0]
            uids = pydicom.uid
            syntax = uids.ImplicitVRLittleEndian if is_implicit else uids.ExplicitVRLittleEndian
            content.file_meta.TransferSyntaxUID = syntax
        problem = _pixel_problem(content)
        if not problem:
            array = content.pixel_array
            return array.reshape(-1, *array.shape[-2:])  # type: ignore[no-any-return]
    raise ValueError(f"{path}: {problem}")


def _pixel_problem(content: Any) -> str:
    """Why the pixels cannot be decoded; empty if they can."""
    from pydicom.pixels import get_decoder

    if not any(f"{kind}PixelData" in content for kind in ("", "Float", "DoubleFloat")):
        return "has no pixels (7FE0,0010), expected an image"
    syntax = content.file_meta.TransferSyntaxUID
    bits = content.get("BitsStored", 0)
    has_lower_bits = content.get("HighBit", 0) >= bits and bits < content.get("BitsAllocated", 0)
    if has_lower_bits and not syntax.is_compressed:  # pydicom takes the lowest bits as the value
        return f"its {bits} bits of each value end at bit {content.HighBit}, expected {bits - 1} (HighBit)"
    if syntax == _JPEG_12_BIT and content.BitsStored > 8 and find_spec("libjpeg") is None:
        return (
            f"compressed as {syntax.name} with {content.BitsStored} bits; "
            "pip install pylibjpeg pylibjpeg-libjpeg (GPL) installs a decoder"
        )
    with suppress(NotImplementedError):  # pydicom knows no decoder for it, such as MPEG
        if not syntax.is_compressed or get_decoder(syntax).is_available:
            return ""
    return (
        f"compressed as {syntax.name}, and no decoder for it is installed; "
        "pip install 'medconv[dicom]' installs those of JPEG, JPEG-LS and JPEG 2000"
    )


def _check_pixels(frame: Frame, pixels: np.ndarray) -> None:
    """Raises: ValueError: the decoded pixels lack this frame, or have another size than its header."""
    columns, rows = frame.size
    if pixels.shape[1:] != (rows, columns) or frame.number >= len(pixels):
        raise ValueError(
            f"{frame.path}: its pixels are {pixels.shape}, "
            f"expected frames of {(rows, columns)} as in its header"
        )


def _rescaled(frame: Frame, pixels: np.ndarray) -> np.ndarray:
    """Values with the unit of the header, such as Hounsfield units."""
    if frame.white is not None:
        pixels = frame.white - pixels.astype(np.float64)
    if (frame.slope, frame.intercept) == (1, 0):
        return pixels
    return pixels * frame.slope + frame.intercept


def _positions_mm(frames: Sequence[Frame]) -> np.ndarray:
    """Positions of the first voxels. Shape: (frames, 3)."""
    return np.array([frame.position_mm for frame in frames], np.float64)


def _text(value: Any) -> str:
    """A header's value for messages."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "(" + ", ".join(f"{number:.6g}" for number in value) + ")"
    return repr(value)
