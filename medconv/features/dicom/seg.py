"""Label maps as DICOM SEG, by highdicom: a segment per class, on the slices of the source series."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import medconv
from medconv.features.dicom import volumes
from medconv.utils.atomic_io import replacing
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

# What missing header elements raise
_INCOMPLETE = (AttributeError, LookupError, TypeError, ValueError)
# Of patient and study, which a source may lack where they were removed; a SEG has them, without a value
_MAY_BE_EMPTY = (
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "AccessionNumber"),
    *("StudyID", "StudyDate", "StudyTime", "ReferringPhysicianName"),
)
_AI = ("123109", "DCM", "Artificial Intelligence")  # value, scheme and meaning of a coded concept
# Private coding scheme, where the standard has no code: the code of a class is its label value
_SCHEME = "99MEDCONV"


def write(path: Path, label: np.ndarray, like: Path, class_names: Sequence[str]) -> None:
    """Write a binary DICOM SEG, atomically. It has no slices without foreground.

    Shape: label (X, Y, Z), on the grid of the series `like`.

    Args:
        path: an existing file is replaced.
        label: label values of `class_names`.
        like: the series that was segmented.
        class_names: by label value.

    Raises:
        OSError: no space left.
        ValueError: the series lacks elements that SEG requires.
    """
    highdicom = needed("highdicom", "dicomseg", "writing DICOM SEG", like)
    with explained(f"{like}: no DICOM SEG can refer to it", *_INCOMPLETE):
        segmentation = _segmentation(highdicom, label, like, class_names)
    segmentation.SpecificCharacterSet = "ISO_IR 192"  # UTF-8: a class may have any name
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial:
        segmentation.save_as(partial)


def _segmentation(highdicom: Any, label: np.ndarray, like: Path, class_names: Sequence[str]) -> Any:
    from pydicom import dcmread

    volume = volumes.volumes(like)[0]
    slices = np.ascontiguousarray(label.transpose(2, 1, 0))  # (slices, rows, columns)
    files = list(dict.fromkeys(frame.path for frame in volume))
    if len(files) < len(volume):  # one file with many frames: SEG expects the order of the file
        slices = slices[np.argsort([frame.number for frame in volume])]
    foreground = list(enumerate(class_names))[1:]
    source_images = [dcmread(file, stop_before_pixels=True) for file in files]
    for image in source_images:
        for keyword in _MAY_BE_EMPTY:
            if keyword not in image:
                setattr(image, keyword, None)
    return highdicom.seg.Segmentation(
        source_images=source_images,
        pixel_array=slices.astype(np.uint8 if len(class_names) <= 256 else np.uint16),
        segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
        segment_descriptions=[_segment(highdicom, value, name) for value, name in foreground],
        series_instance_uid=highdicom.UID(),
        series_number=1000,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="medconv",
        manufacturer_model_name="medconv",
        software_versions=medconv.__version__,
        device_serial_number="0",
        series_description="medconv",
        pixel_measures=_pixel_measures(highdicom, volume),
    )


def _pixel_measures(highdicom: Any, volume: volumes.Volume) -> Any:
    """Spacing between columns, rows and slices; between slices from their positions, not their headers."""
    slice_step = volumes.affine(volume)[:3, 2]
    spacing_mm = volume[0].spacing_mm
    assert spacing_mm is not None  # checked by `affine`
    return highdicom.PixelMeasuresSequence(
        pixel_spacing=spacing_mm[::-1],  # SEG has rows first
        slice_thickness=volume[0].thickness_mm,
        spacing_between_slices=float(np.linalg.norm(slice_step)),
    )


def _segment(highdicom: Any, value: int, name: str) -> Any:
    from medconv.features.dicom.codes import ANATOMY, concept_of, long_string

    coded = highdicom.sr.CodedConcept
    label = long_string(name)
    concept = concept_of(name)
    segment = highdicom.seg.SegmentDescription(
        segment_number=value,
        segment_label=label,
        segmented_property_category=concept.category if concept else ANATOMY,
        segmented_property_type=concept.type if concept else coded(str(value), _SCHEME, label),
        algorithm_type=highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
        algorithm_identification=highdicom.AlgorithmIdentificationSequence(
            name="medconv", family=coded(*_AI), version=medconv.__version__
        ),
    )
    if concept:
        segment.SegmentedPropertyTypeCodeSequence = [concept.type_item()]
    return segment
