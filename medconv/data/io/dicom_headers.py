"""DICOM headers: the frames of a file, and their position in the patient.

A classic file has one frame; an enhanced file has many, each with the elements of its functional groups. Both
become a `Frame`. `dicom` combines frames into volumes.
"""

import os
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

# What separates frames at one position, first match wins: b-value, time point, echo, part of a Dixon or phase
# image, ...
MARKS = (
    *("DiffusionBValue", "TemporalPositionIdentifier", "TemporalPositionIndex", "EchoTime"),
    *("EffectiveEchoTime", "InversionTime", "TriggerTime", "ImageType", "FrameType", "AcquisitionNumber"),
)
_B_VALUE = (0x0019, 0x100C)  # of Siemens, private; it stands in for DiffusionBValue, then SequenceName does
_B_IN_NAME = re.compile(r"b(\d+)")  # such as *ep_b50t, or *ep_b1000#12
_CHOICE = re.compile(r"(?<=[^/])#(\d+|b=\d+(?:\.\d+)?|roi=[^/]+)$")
_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_READ = (
    *("SOPInstanceUID", "SeriesInstanceUID", "SeriesNumber", "SeriesDescription", "Modality"),
    *("NumberOfFrames", "Rows", "Columns", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing"),
    *("ImagerPixelSpacing", "SliceThickness", "SpacingBetweenSlices", "RescaleSlope", "RescaleIntercept"),
    *("ModalityLUTSequence", "SamplesPerPixel", "PhotometricInterpretation", "BitsStored"),
    *("PixelRepresentation", "Manufacturer", "SequenceName", *MARKS, *_GROUPS),
)
# What exports put next to images
_OTHER_SUFFIXES = (".txt", ".json", ".xml", ".csv", ".html", ".md", ".pdf", ".png", ".jpg")
_OTHER_NAMES = {"DICOMDIR", "LICENSE", "README", "VERSION", "THUMBS.DB"}
_MAX_FIRST, _LAST_FIRST = 128, 0x18  # bytes and number of the first element of a file without preamble
_NO_IMAGES = ("SEG", "RTDOSE")  # not images, although they have rows and columns


@dataclass(frozen=True)
class Frame:
    """One slice: a file, or one frame of a file. Lengths in mm along left, posterior, superior.

    Args:
        number: of the frame in its file, from 0.
        series: the UID; title: its number and description, for messages and names.
        size: columns and rows. spacing_mm: between columns and between rows.
        position_mm: centre of the first voxel. orientation: six numbers, unit vectors along a row and down a
            column. Both None: a projection.
        thickness_mm: of the slice, from the header; used for a single slice.
        slope, intercept: from stored to rescaled values.
        white: MONOCHROME1 only: the highest stored value, which becomes the lowest; else None.
        marks: values of `MARKS`, None if absent.
    """

    path: Path
    number: int
    uid: str
    series: str
    title: str
    modality: str
    size: tuple[int, int]
    position_mm: tuple[float, ...] | None
    orientation: tuple[float, ...] | None
    spacing_mm: tuple[float, ...] | None
    thickness_mm: float
    slope: float
    intercept: float
    white: int | None
    marks: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.path.name}, frame {self.number + 1}" if self.number else self.path.name


def choice_of(path: Path) -> tuple[Path, str]:
    """A series, and which of its volumes: `dwi#2` is the second, `dwi#b=50` that b-value; empty: all.

    For `rtstruct` its structures, `rs.dcm#roi=heart;lung`.
    """
    match = _CHOICE.search(str(path))
    if match is None or path.exists():
        return path, ""
    return Path(str(path)[: match.start()]), match[0]


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM, or a folder contains a DICOM file; subfolders are not searched.

    Args: path: as `choice_of` takes it.
    """
    files: list[Path] = []
    path, _ = choice_of(path)
    with suppress(OSError, ValueError):  # ValueError: an impossible name
        files = [path / name for name, *_ in list_files(path)] if path.is_dir() else [path]
    for file in files:
        with suppress(OSError, ValueError):
            if _has_mark(file):
                return True
    return False


def list_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size in bytes and modification time in ns of possible DICOM files in a folder, sorted by name.

    Skips hidden files and what exports put next to images: DICOMDIR, notes, tables, previews.
    """
    with os.scandir(folder) as entries:
        files = [(e.name, e.stat()) for e in entries if not _is_other_file(e.name) and e.is_file()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files))


def frames_of(path: Path) -> tuple[list[Frame], str]:
    """The frames of a file; or none, and why it is skipped: not an image, a localizer, colour.

    Raises: ValueError: not DICOM, damaged, or without a usable position.
    """
    with explained(f"{path}: cannot be read", OSError):
        if not _has_mark(path):
            raise ValueError(
                f"{path}: not a DICOM file (no DICM after 128 bytes); expected only slices in a folder"
            )
    pydicom = needed("pydicom", "dicom", "reading DICOM", path)
    with explained(f"{path}: its DICOM header cannot be used"):
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=[*_READ, _B_VALUE], force=True)
        elements = {element.keyword: element.value for element in header if element.keyword}
        if "DiffusionBValue" not in elements and (b_value := _siemens_b_value(header)) is not None:
            elements["DiffusionBValue"] = b_value
        if reason := _skip_reason(elements):
            return [], reason
        count = _count_frames(elements)
        return [_frame(path, number, _frame_elements(elements, number)) for number in range(count)], ""


def _siemens_b_value(header: Any) -> float | None:
    """Of Siemens scanners before XA, which do not write `DiffusionBValue`; None if there is none."""
    if not str(header.get("Manufacturer") or "").upper().startswith("SIEMENS"):
        return None
    with suppress(ValueError, TypeError):  # an element that a transfer has changed
        value = header[_B_VALUE].value if _B_VALUE in header else None
        return float(value.decode() if isinstance(value, bytes) else value)  # type: ignore[arg-type]
    found = _B_IN_NAME.search(str(header.get("SequenceName") or ""))
    return float(found[1]) if found else None


def _skip_reason(elements: dict[str, Any]) -> str:
    modality = elements.get("Modality") or "no modality"
    photometric = str(elements.get("PhotometricInterpretation"))
    if modality == "RTSTRUCT":
        return "contours (RTSTRUCT), which are labels with #roi=NAME;NAME after the file's name"
    if "Rows" not in elements or modality in _NO_IMAGES:
        return f"not an image ({modality})"
    if "LOCALIZER" in _strings(elements.get("ImageType")):
        return "a localizer"
    if int(elements.get("SamplesPerPixel") or 1) != 1 or photometric.startswith("PALETTE"):
        return f"a colour image ({photometric})"
    return ""


def _count_frames(elements: dict[str, Any]) -> int:
    if "MOSAIC" in _strings(elements.get("ImageType")):
        raise ValueError(
            "a Siemens mosaic, with its slices side by side in one picture; convert it to NIfTI, for example "
            "with dcm2niix"
        )
    count = int(elements.get("NumberOfFrames") or 1)
    places = len(elements.get(_GROUPS[1]) or ())
    if count != (places or 1):
        where = f"{places} have a position in the patient"
        raise ValueError(f"{count} frames, of which {where}; expected slices, not a cine")
    if elements.get("ModalityLUTSequence"):
        raise ValueError("values use a Modality LUT Sequence, expected RescaleSlope and RescaleIntercept")
    return count


def _frame_elements(elements: dict[str, Any], number: int) -> dict[str, Any]:
    """Elements by keyword: of the file, of the shared functional groups, and of the frame."""
    elements = dict(elements)
    shared, per_frame = (elements.get(name) or () for name in _GROUPS)
    for macro in (macro for group in (*shared[:1], *per_frame[number : number + 1]) for macro in group):
        if macro.VR == "SQ" and macro.value:
            elements |= {element.keyword: element.value for element in macro.value[0]}
    return elements


def _frame(path: Path, number: int, elements: dict[str, Any]) -> Frame:
    spacing = _numbers(elements, "PixelSpacing", 2) or _numbers(elements, "ImagerPixelSpacing", 2)
    distances = [_number(elements, name, 0.0) for name in ("SpacingBetweenSlices", "SliceThickness")]
    slope, intercept = _number(elements, "RescaleSlope", 1.0), _number(elements, "RescaleIntercept", 0.0)
    if slope == 0:
        raise ValueError("RescaleSlope is 0, so all values are equal")
    title = [elements.get(name) for name in ("SeriesNumber", "SeriesDescription")]
    return Frame(
        path,
        number,
        str(elements.get("SOPInstanceUID") or ""),
        str(elements.get("SeriesInstanceUID") or ""),
        " ".join(str(part) for part in title if part not in (None, "")),
        str(elements.get("Modality") or ""),
        (int(elements["Columns"]), int(elements["Rows"])),
        _numbers(elements, "ImagePositionPatient", 3),
        _numbers(elements, "ImageOrientationPatient", 6),
        spacing and spacing[::-1],  # the header has rows first
        next((mm for mm in distances if mm > 0), 1.0),
        slope,
        intercept,
        _white(elements) if (slope, intercept) == (1, 0) else None,
        tuple(_mark(elements.get(name)) for name in MARKS),
    )


def _white(elements: dict[str, Any]) -> int | None:
    """For values without a unit, as in radiographs, bright becomes high."""
    if elements.get("PhotometricInterpretation") != "MONOCHROME1":
        return None
    return -1 if elements.get("PixelRepresentation") else 2 ** int(elements["BitsStored"]) - 1


def _number(elements: dict[str, Any], name: str, default: float) -> float:
    return (_numbers(elements, name, 1) or (default,))[0]


def _numbers(elements: dict[str, Any], name: str, count: int) -> tuple[float, ...] | None:
    """None if the element is absent or empty."""
    value = elements.get(name)
    values = [value] if isinstance(value, (str, int, float)) and value != "" else list(value or ())
    if values and (len(values) != count or not all(isfinite(float(v)) for v in values)):
        raise ValueError(f"{name} must be {count} numbers, got {values}")
    return tuple(float(v) for v in values) or None


def _mark(value: Any) -> float | str | None:
    if value is None or value == "":
        return None
    return float(value) if isinstance(value, (int, float)) else "/".join(_strings(value))


def _strings(value: Any) -> Sequence[str]:
    return [value] if isinstance(value, str) else [str(part) for part in value or ()]


def _is_other_file(name: str) -> bool:
    return name.startswith(".") or name.upper() in _OTHER_NAMES or name.lower().endswith(_OTHER_SUFFIXES)


def _has_mark(path: Path) -> bool:
    """Whether the file starts with 128 bytes and DICM, or, without them, with elements of group 2 or 8."""
    with path.open("rb") as file:
        start = file.read(132)
    group, number, length = struct.unpack("<HHI", start[:8].ljust(8, b"\0"))
    implicit = 0 < length < _MAX_FIRST and length % 2 == 0
    explicit = start[4:6] in (b"UL", b"UI", b"CS", b"OB")
    bare = group in (2, 8) and number <= _LAST_FIRST and (implicit or explicit)
    return start[128:] == b"DICM" or (len(start) == 132 and bare)
