"""DICOM headers: the frames of a file, and their position in the patient.

A classic file has one frame; an enhanced file has many, each with the elements of its functional groups. Both
become a `Frame`. `dicom` combines frames into volumes.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from medconv.features.dicom.files import has_dicom_start
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_Elements = dict[str, Any]  # keyword to value

# What separates frames at one position, first match wins: b-value, time point, echo, part of a Dixon or phase
# image, ...
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
# Siemens scanners without DiffusionBValue have a private element, or else the name of the sequence
_SIEMENS_B_VALUE = (0x0019, 0x100C)
_B_IN_SEQUENCE_NAME = re.compile(r"b(\d+)")  # such as *ep_b50t, or *ep_b1000#12
_SHARED_GROUPS = "SharedFunctionalGroupsSequence"
_FRAME_GROUPS = "PerFrameFunctionalGroupsSequence"
# The only elements that are parsed, for speed
_KEYWORDS = (
    "SOPInstanceUID",
    "SeriesInstanceUID",
    "SeriesNumber",
    "SeriesDescription",
    "Modality",
    "NumberOfFrames",
    "Rows",
    "Columns",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
    "ImagerPixelSpacing",
    "SliceThickness",
    "SpacingBetweenSlices",
    "RescaleSlope",
    "RescaleIntercept",
    "RescaleType",
    "ModalityLUTSequence",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "BitsStored",
    "PixelRepresentation",
    "Manufacturer",
    "SequenceName",
    *MARKS,
    _SHARED_GROUPS,
    _FRAME_GROUPS,
)
_NOT_IMAGES = ("SEG", "RTDOSE")  # modalities that are not images, although they have rows and columns


@dataclass(frozen=True)
class Frame:
    """One slice: a file, or one frame of a file. Lengths in mm along left, posterior, superior.

    Args:
        path: the file.
        number: index of the frame in its file, from 0.
        uid: SOPInstanceUID of the file.
        series: SeriesInstanceUID.
        title: number and description of the series, for messages and names.
        modality: such as `MR`.
        size: columns and rows.
        position_mm: centre of the first voxel; None: a projection.
        orientation: six numbers, unit vectors along a row and down a column; None: a projection.
        spacing_mm: between columns and between rows; None: unknown.
        thickness_mm: of the slice, from the header; used for a single slice.
        slope: from stored to rescaled values.
        intercept: added after the slope.
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
        """File name and frame, for messages; frames are counted from 1."""
        if self.number == 0:
            return self.path.name
        return f"{self.path.name}, frame {self.number + 1}"


def frames_of(path: Path) -> tuple[list[Frame], str]:
    """The frames of a file; or none, and why it is skipped: not an image, a localizer, colour.

    Raises:
        ValueError: not DICOM, damaged, or without a usable position.
    """
    with explained(f"{path}: cannot be read", OSError):
        if not has_dicom_start(path):
            raise ValueError(
                f"{path}: not a DICOM file (no DICM after 128 bytes); expected only slices in a folder"
            )
    pydicom = needed("pydicom", "dicom", "reading DICOM", path)
    with explained(f"{path}: its DICOM header cannot be used"):
        header = pydicom.dcmread(
            path,
            stop_before_pixels=True,
            specific_tags=[*_KEYWORDS, _SIEMENS_B_VALUE],
            force=True,  # also files without a preamble
        )
        elements = _elements_of(header)
        skip_reason = _skip_reason(elements)
        if skip_reason:
            return [], skip_reason
        num_frames = _count_frames(elements)
        frames = [_frame(path, number, _frame_elements(elements, number)) for number in range(num_frames)]
    return frames, ""


def _elements_of(header: Any) -> _Elements:
    elements = {element.keyword: element.value for element in header if element.keyword}
    if "DiffusionBValue" not in elements:
        b_value = _siemens_b_value(header)
        if b_value is not None:
            elements["DiffusionBValue"] = b_value
    return elements


def _siemens_b_value(header: Any) -> float | None:
    """The b-value of Siemens scanners before XA, which do not write `DiffusionBValue`; None: absent."""
    manufacturer = str(header.get("Manufacturer") or "")
    if not manufacturer.upper().startswith("SIEMENS"):
        return None
    with suppress(ValueError, TypeError):  # an element that a transfer has changed
        value = header[_SIEMENS_B_VALUE].value if _SIEMENS_B_VALUE in header else None
        text = value.decode() if isinstance(value, bytes) else value
        return float(text)  # type: ignore[arg-type]
    match = _B_IN_SEQUENCE_NAME.search(str(header.get("SequenceName") or ""))
    return float(match[1]) if match else None


def _skip_reason(elements: _Elements) -> str:
    """Why a file is no slice of a volume; empty: it may be one."""
    modality = elements.get("Modality") or "no modality"
    photometric = str(elements.get("PhotometricInterpretation"))
    if modality == "RTSTRUCT":
        return "contours (RTSTRUCT), which are labels with #roi=NAME;NAME after the file's name"
    if "Rows" not in elements or modality in _NOT_IMAGES:
        return f"not an image ({modality})"
    if "LOCALIZER" in _strings(elements.get("ImageType")):
        return "a localizer"
    samples_per_pixel = int(elements.get("SamplesPerPixel") or 1)
    if samples_per_pixel != 1 or photometric.startswith("PALETTE"):
        return f"a colour image ({photometric})"
    return ""


def _count_frames(elements: _Elements) -> int:
    """Number of frames of a file.

    Raises: ValueError: frames without positions, or values that need a lookup table.
    """
    if "MOSAIC" in _strings(elements.get("ImageType")):
        raise ValueError(
            "a Siemens mosaic, with its slices side by side in one picture; "
            "convert it to NIfTI, for example with dcm2niix"
        )
    num_frames = int(elements.get("NumberOfFrames") or 1)
    num_positions = len(elements.get(_FRAME_GROUPS) or ())
    if num_frames != (num_positions or 1):
        raise ValueError(
            f"{num_frames} frames, of which {num_positions} have a position in the patient; "
            "expected slices, not a cine"
        )
    if elements.get("ModalityLUTSequence"):
        raise ValueError("values use a Modality LUT Sequence, expected RescaleSlope and RescaleIntercept")
    return num_frames


def _frame_elements(elements: _Elements, number: int) -> _Elements:
    """Elements that hold for a frame: of the file, of the shared functional groups, and of the frame."""
    shared = elements.get(_SHARED_GROUPS) or ()
    per_frame = elements.get(_FRAME_GROUPS) or ()
    frame_elements = dict(elements)
    # Slices, since a classic file has neither; later groups override earlier ones
    for group in (*shared[:1], *per_frame[number : number + 1]):
        for macro in group:
            # Philips repeats public elements with other values in a private copy of classic headers
            if macro.VR == "SQ" and macro.value and not macro.tag.is_private:
                macro_elements = {element.keyword: element.value for element in macro.value[0]}
                frame_elements.update(macro_elements)
    return frame_elements


def _frame(path: Path, number: int, elements: _Elements) -> Frame:
    slope = _number(elements, "RescaleSlope", 1.0)
    intercept = _number(elements, "RescaleIntercept", 0.0)
    if slope == 0:
        raise ValueError("RescaleSlope is 0, so all values are equal")
    # `US`: of no unit
    has_unit = (slope, intercept) != (1, 0) and elements.get("RescaleType") != "US"
    return Frame(
        path=path,
        number=number,
        uid=str(elements.get("SOPInstanceUID") or ""),
        series=str(elements.get("SeriesInstanceUID") or ""),
        title=_title(elements),
        modality=str(elements.get("Modality") or ""),
        size=(int(elements["Columns"]), int(elements["Rows"])),
        position_mm=_numbers(elements, "ImagePositionPatient", 3),
        orientation=_numbers(elements, "ImageOrientationPatient", 6),
        spacing_mm=_spacing_mm(elements),
        thickness_mm=_thickness_mm(elements),
        slope=slope,
        intercept=intercept,
        white=None if has_unit else _white(elements),
        marks=tuple(_mark(elements.get(keyword)) for keyword in MARKS),
    )


def _title(elements: _Elements) -> str:
    values = [elements.get(keyword) for keyword in ("SeriesNumber", "SeriesDescription")]
    return " ".join(str(value) for value in values if value not in (None, ""))


def _spacing_mm(elements: _Elements) -> tuple[float, ...] | None:
    """Spacing between columns and between rows; the header has rows first."""
    spacing = _numbers(elements, "PixelSpacing", 2) or _numbers(elements, "ImagerPixelSpacing", 2)
    return spacing and spacing[::-1]


def _thickness_mm(elements: _Elements) -> float:
    """Distance of slices, or else their thickness; 1 mm if the header has neither."""
    distances = [_number(elements, keyword, 0.0) for keyword in ("SpacingBetweenSlices", "SliceThickness")]
    return next((mm for mm in distances if mm > 0), 1.0)


def _white(elements: _Elements) -> int | None:
    """Highest stored value of MONOCHROME1, in which it is black; None for other images.

    For values without a unit, as in radiographs, bright becomes high.
    """
    if elements.get("PhotometricInterpretation") != "MONOCHROME1":
        return None
    is_signed = elements.get("PixelRepresentation")
    return -1 if is_signed else 2 ** int(elements["BitsStored"]) - 1


def _number(elements: _Elements, keyword: str, default: float) -> float:
    numbers = _numbers(elements, keyword, 1)
    return default if numbers is None else numbers[0]


def _numbers(elements: _Elements, keyword: str, count: int) -> tuple[float, ...] | None:
    """The numbers of an element; None if it is absent or empty.

    Raises: ValueError: the wrong count, or a number that is not finite.
    """
    value = elements.get(keyword)
    is_single = isinstance(value, (str, int, float)) and value != ""
    values: list[Any] = [value] if is_single else list(value or ())
    if not values:
        return None
    if len(values) != count or not all(isfinite(float(number)) for number in values):
        raise ValueError(f"{keyword} must be {count} numbers, got {values}")
    return tuple(float(number) for number in values)


def _mark(value: Any) -> float | str | None:
    """A value that can be compared: a number, a text, or several values as one text."""
    if value is None or value == "":
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return "/".join(_strings(value))


def _strings(value: Any) -> Sequence[str]:
    """The values of an element that may have one, several or none."""
    if isinstance(value, str):
        return [value]
    return [str(item) for item in value or ()]
