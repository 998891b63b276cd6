"""DICOM headers: the frames of a file, where each lies in the patient, and what tells frames of one place
apart.

A classic file is one frame; an enhanced one has many, each with the elements of its functional groups. Here
both become the same `Frame`. Which of them make a volume is the matter of `dicom`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from medconv.utils.optional_imports import needed

# What tells frames of one place apart, the first that does: b-value, time point, echo, part of a Dixon or
# phase image, ...
MARKS = (
    "DiffusionBValue",
    "TemporalPositionIdentifier",
    "TemporalPositionIndex",
    "EchoTime",
    "EffectiveEchoTime",
    "InversionTime",
    "TriggerTime",
    "ImageType",
    "FrameType",
    "AcquisitionNumber",
)
_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_READ = (
    *(
        "SOPInstanceUID",
        "SeriesInstanceUID",
        "SeriesNumber",
        "SeriesDescription",
        "Modality",
        "Rows",
        "Columns",
    ),
    *(
        "ImagePositionPatient",
        "ImageOrientationPatient",
        "PixelSpacing",
        "ImagerPixelSpacing",
        "NumberOfFrames",
    ),
    *("SliceThickness", "SpacingBetweenSlices", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence"),
    *("SamplesPerPixel", "PhotometricInterpretation", "BitsStored", "PixelRepresentation"),
    *MARKS,
    *_GROUPS,
)
_BESIDE = (
    ".txt",
    ".json",
    ".xml",
    ".csv",
    ".html",
    ".md",
    ".pdf",
    ".png",
    ".jpg",
)  # what exports put beside images
_NAMES = {"DICOMDIR", "LICENSE", "README", "VERSION", "THUMBS.DB"}
_NO_IMAGES = ("SEG", "RTDOSE")  # have rows and columns all the same


@dataclass(frozen=True)
class Frame:
    """One slice: a file, or one frame of it. Lengths in mm, in the patient's axes: left, posterior, superior.

    Args:
        number: of the frame in its file, from 0.
        series: the UID; title: its number and description, for messages and names.
        size: columns and rows. spacing_mm: between columns and between rows.
        position_mm: of the first voxel's centre. orientation: unit vectors along a row and down a column, six
            numbers. None of both: a projection, which has no place.
        thickness_mm: of the slice, from the header; what a lone slice goes by.
        slope, intercept: from stored values to those of the modality.
        white: the stored value that MONOCHROME1 shows black and that is to be the lowest; None: values are as
            they should.
        marks: values of `MARKS`, None where absent.
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


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM, or a folder has a file that is; subfolders do not count."""
    try:
        files = [path / name for name, *_ in listing(path)] if path.is_dir() else [path]
    except (OSError, ValueError):
        return False
    return any(map(_may_be, files))


def listing(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size in bytes and time of change in ns of the files in a folder that are to be DICOM; by name.

    Hidden files are left out, and what exports put beside images: DICOMDIR, notes, tables, previews.
    """
    with os.scandir(folder) as entries:
        files = [
            (entry.name, entry.stat()) for entry in entries if not _beside(entry.name) and entry.is_file()
        ]
    return tuple(sorted((name, found.st_size, found.st_mtime_ns) for name, found in files))


def frames_of(path: Path) -> tuple[list[Frame], str]:
    """The frames of a file; or none, and why it is left out: no image, a localizer, colour.

    Raises: ValueError: no DICOM, damaged, or of a kind that cannot be placed.
    """
    if not _marked(path):
        raise ValueError(
            f"{path}: not a DICOM file (no DICM after 128 bytes); expected slices alone in a series' folder"
        )
    pydicom = needed("pydicom", "dicom", "reading DICOM", path)
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=list(_READ))
        found = {element.keyword: element.value for element in header}
        reason = _left_out(found)
        return (
            ([], reason)
            if reason
            else ([_frame(path, n, _of_frame(found, n)) for n in range(_count(found))], "")
        )
    except Exception as error:  # damaged headers make pydicom raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: its DICOM header cannot be used ({said})") from error


def _left_out(found: dict[str, Any]) -> str:
    modality, photometric = (
        found.get("Modality") or "of no modality",
        str(found.get("PhotometricInterpretation")),
    )
    if "Rows" not in found or modality in _NO_IMAGES:
        return f"no image ({modality})"
    if "LOCALIZER" in _strings(found.get("ImageType")):
        return "a localizer"
    if int(found.get("SamplesPerPixel") or 1) != 1 or photometric.startswith("PALETTE"):
        return f"a colour image ({photometric})"
    return ""


def _count(found: dict[str, Any]) -> int:
    if "MOSAIC" in _strings(found.get("ImageType")):
        raise ValueError(
            "a Siemens mosaic, whose slices lie side by side in one picture; convert it, as by dcm2niix, to "
            "NIfTI"
        )
    count = int(found.get("NumberOfFrames") or 1)
    places = len(found.get(_GROUPS[1]) or ())
    if count != (places or 1):
        raise ValueError(
            f"{count} frames, of which {places} have a place in the patient; expected slices, not a cine"
        )
    if found.get("ModalityLUTSequence"):
        raise ValueError("values by a Modality LUT Sequence, expected RescaleSlope and RescaleIntercept")
    return count


def _of_frame(found: dict[str, Any], number: int) -> dict[str, Any]:
    """Elements by keyword: of the file, of the groups that all frames share, and of the frame's own."""
    known = dict(found)
    for groups in ((found.get(_GROUPS[0]) or ())[:1], (found.get(_GROUPS[1]) or ())[number : number + 1]):
        for macro in (
            element for group in groups for element in group if element.VR == "SQ" and element.value
        ):
            known |= {element.keyword: element.value for element in macro.value[0]}
    return known


def _frame(path: Path, number: int, found: dict[str, Any]) -> Frame:
    spacing = _numbers(found, "PixelSpacing", 2) or _numbers(found, "ImagerPixelSpacing", 2)
    distances = [_number(found, name, 0.0) for name in ("SpacingBetweenSlices", "SliceThickness")]
    slope, intercept = _number(found, "RescaleSlope", 1.0), _number(found, "RescaleIntercept", 0.0)
    if slope == 0:
        raise ValueError("RescaleSlope is 0, so that all values are the same")
    return Frame(
        path,
        number,
        str(found.get("SOPInstanceUID") or ""),
        str(found.get("SeriesInstanceUID") or ""),
        " ".join(
            str(found[name])
            for name in ("SeriesNumber", "SeriesDescription")
            if found.get(name) not in (None, "")
        ),
        str(found.get("Modality") or ""),
        (int(found["Columns"]), int(found["Rows"])),
        _numbers(found, "ImagePositionPatient", 3),
        _numbers(found, "ImageOrientationPatient", 6),
        spacing and spacing[::-1],  # the header has rows first
        next((mm for mm in distances if mm > 0), 1.0),
        slope,
        intercept,
        _white(found) if (slope, intercept) == (1, 0) else None,
        tuple(_mark(found.get(name)) for name in MARKS),
    )


def _white(found: dict[str, Any]) -> int | None:
    """Where values are no quantities, as in radiographs, bright is to be high."""
    if found.get("PhotometricInterpretation") != "MONOCHROME1":
        return None
    return -1 if found.get("PixelRepresentation") else 2 ** int(found["BitsStored"]) - 1


def _number(found: dict[str, Any], name: str, default: float) -> float:
    return (_numbers(found, name, 1) or (default,))[0]


def _numbers(found: dict[str, Any], name: str, count: int) -> tuple[float, ...] | None:
    """None where the element is absent or empty."""
    value = found.get(name)
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


def _beside(name: str) -> bool:
    return name.startswith(".") or name.upper() in _NAMES or name.lower().endswith(_BESIDE)


def _may_be(path: Path) -> bool:
    try:
        return _marked(path)
    except (OSError, ValueError):  # the latter: no possible name
        return False


def _marked(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"
