"""Label maps as RTSTRUCT, the contours of radiotherapy: a structure per class, contours on each slice."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.affines import apply_affine
from scipy.ndimage import find_objects
from scipy.spatial.distance import cdist

import medconv
from medconv.data.io.raster import colour
from medconv.features.dicom import volumes
from medconv.utils.atomic_io import replacing
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

# Elements of the patient and the study, which RTSTRUCT must have, if only without a value
_OF_THE_STUDY = (
    "PatientName",
    "PatientID",
    "PatientBirthDate",
    "PatientSex",
    "StudyInstanceUID",
    "StudyDate",
    "StudyTime",
    "StudyID",
    "AccessionNumber",
    "ReferringPhysicianName",
)
_NEEDED = ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")
_STUDY_CLASS = "1.2.840.10008.3.1.2.3.1"  # that the standard has for references to a study


def write(path: Path, label: np.ndarray, like: Path, class_names: Sequence[str]) -> None:
    """Write an RTSTRUCT, atomically. A class without voxels is a structure without contours.

    Contours pass halfway between voxels inside and outside, so that filling them gives the label map again.

    Shape: label (X, Y, Z), on the grid of the series `like`.

    Args:
        path: an existing file is replaced.
        label: label values of `class_names`.
        like: the series that was segmented.
        class_names: by label value.

    Raises:
        OSError: no space left.
        ValueError: the series lacks elements that RTSTRUCT requires.
    """
    pydicom = needed("pydicom", "dicom", "writing RTSTRUCT", like)
    volume = volumes.volumes(like)[0]
    source = pydicom.dcmread(volume[0].path, stop_before_pixels=True, force=True)
    missing = [keyword for keyword in _NEEDED if not source.get(keyword)]
    if missing:
        raise ValueError(f"{like}: no RTSTRUCT can refer to it (has no {', '.join(missing)})")
    with explained(f"{like}: no RTSTRUCT can refer to it"):
        content = _structure_set(pydicom, source, volume)
        _add_structures(content, label, volume, source.SOPClassUID, class_names)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as partial:
        content.save_as(partial, enforce_file_format=True)


def _structure_set(pydicom: Any, source: Any, volume: volumes.Volume) -> Any:
    """The file without its structures. Args: source: header of the first slice."""
    meta = pydicom.dataset.FileMetaDataset()
    # Explicit elements hold 64 kB, some 2000 points of a contour
    meta.TransferSyntaxUID = pydicom.uid.ImplicitVRLittleEndian
    now = datetime.now()
    content = pydicom.dataset.FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    content.update({keyword: source.get(keyword) for keyword in _OF_THE_STUDY})
    content.update(
        {
            "SpecificCharacterSet": "ISO_IR 192",  # UTF-8: a class may have any name
            "SOPClassUID": pydicom.uid.RTStructureSetStorage,
            "SOPInstanceUID": pydicom.uid.generate_uid(),
            "Modality": "RTSTRUCT",
            "SeriesInstanceUID": pydicom.uid.generate_uid(),
            "SeriesNumber": 1001,
            "SeriesDescription": "medconv",
            "InstanceNumber": 1,
            "OperatorsName": "",
            "FrameOfReferenceUID": source.FrameOfReferenceUID,
            "PositionReferenceIndicator": source.get("PositionReferenceIndicator"),
            "Manufacturer": "medconv",
            "ManufacturerModelName": "medconv",
            "SoftwareVersions": medconv.__version__,
            "StructureSetLabel": "medconv",
            "StructureSetDate": now.strftime("%Y%m%d"),
            "StructureSetTime": now.strftime("%H%M%S"),
            "ApprovalStatus": "UNAPPROVED",
        }
    )
    series = _item(
        SeriesInstanceUID=source.SeriesInstanceUID,
        ContourImageSequence=[
            _item(ReferencedSOPClassUID=source.SOPClassUID, ReferencedSOPInstanceUID=uid)
            for uid in dict.fromkeys(frame.uid for frame in volume)
        ],
    )
    study = _item(
        ReferencedSOPClassUID=_STUDY_CLASS,
        ReferencedSOPInstanceUID=source.StudyInstanceUID,
        RTReferencedSeriesSequence=[series],
    )
    content.ReferencedFrameOfReferenceSequence = [
        _item(FrameOfReferenceUID=source.FrameOfReferenceUID, RTReferencedStudySequence=[study])
    ]
    return content


def _add_structures(
    content: Any, label: np.ndarray, volume: volumes.Volume, sop_class: str, class_names: Sequence[str]
) -> None:
    """Add name, contours and code of each class. Args: sop_class: UID of that of the images."""
    from medconv.features.dicom.codes import long_string

    space = content.FrameOfReferenceUID
    names = list(enumerate(class_names))[1:]
    content.StructureSetROISequence = [
        _item(
            ROINumber=value,
            ReferencedFrameOfReferenceUID=space,
            ROIName=long_string(name),
            ROIGenerationAlgorithm="AUTOMATIC",
        )
        for value, name in names
    ]
    content.ROIContourSequence = [
        _item(ReferencedROINumber=value, ROIDisplayColor=list(bytes.fromhex(colour(value)[1:])))
        for value, _ in names
    ]
    content.RTROIObservationsSequence = [_observation(value, name) for value, name in names]
    boxes = find_objects(label, max_label=len(names))
    for contours, (value, _), box in zip(content.ROIContourSequence, names, boxes, strict=True):
        if box is not None:
            contours.ContourSequence = list(_contour_items(label[box] == value, box, volume, sop_class))


def _observation(value: int, name: str) -> Any:
    """What a structure is, with a code where the standard has one for the name."""
    from medconv.features.dicom.codes import concept_of

    observation = _item(
        ObservationNumber=value, ReferencedROINumber=value, RTROIInterpretedType="", ROIInterpreter=""
    )
    concept = concept_of(name)
    if concept is not None:
        observation.RTROIIdentificationCodeSequence = [concept.type_item()]
    return observation


def _contour_items(
    mask: np.ndarray, box: Sequence[slice], volume: volumes.Volume, sop_class: str
) -> Iterator[Any]:
    """The contours of a class, in mm. Args: mask: its voxels within the box, (X, Y, Z) bool."""
    from pydicom import DataElement

    lps_from_voxels = np.diag([-1.0, -1.0, 1.0, 1.0]) @ volumes.affine(volume)
    is_one_file = len({frame.uid for frame in volume}) < len(volume)
    corner = [side.start for side in box]
    for slice_index in range(mask.shape[2]):
        frame = volume[corner[2] + slice_index]
        for polygon in _contours(mask[:, :, slice_index]):
            image = _item(ReferencedSOPClassUID=sop_class, ReferencedSOPInstanceUID=frame.uid)
            if is_one_file:
                image.ReferencedFrameNumber = frame.number + 1
            voxels = np.insert(polygon, 2, slice_index, axis=1) + corner
            points_mm = apply_affine(lps_from_voxels, voxels)
            contour = _item(
                ContourImageSequence=[image],
                ContourGeometricType="CLOSED_PLANAR",
                NumberOfContourPoints=len(points_mm),
            )
            # As one text: a number of pydicom's has some 500 bytes, and a body has millions of them
            text = "\\".join(f"{number:.4f}" for number in points_mm.ravel().tolist())
            contour["ContourData"] = DataElement("ContourData", "DS", text, already_converted=True)
            yield contour


def _item(**elements: Any) -> Any:
    from pydicom import Dataset

    item: Any = Dataset()
    item.update(elements)  # by keyword
    return item


def _contours(mask: np.ndarray) -> list[np.ndarray]:
    """Closed polygons around the voxels of a slice. One with holes is a keyhole: seams lead to them and back.

    Shape: mask (X, Y) -> (points, 2) each, in voxels; the last point is not the first again.
    """
    from contourpy import FillType, contour_generator

    padded = np.pad(mask, 1).T.astype(np.float32)  # a polygon must not end at the border
    generator = contour_generator(z=padded, fill_type=FillType.OuterOffset)
    contours = []
    for points, offsets in zip(*generator.filled(0.5, 1.5), strict=True):
        outer, *holes = [_corners(ring[:-1] - 1) for ring in np.split(points, offsets[1:-1])]
        for hole in holes:
            start, end = np.unravel_index(cdist(outer, hole).argmin(), (len(outer), len(hole)))
            there_and_back = [hole[end:], hole[: end + 1]]
            outer = np.concatenate([outer[: start + 1], *there_and_back, outer[start:]])
        contours.append(outer)
    return contours


def _corners(ring: np.ndarray) -> np.ndarray:
    """The ring without points on a straight line between their neighbours. Shape: (points, 2)."""
    before = ring - np.roll(ring, 1, axis=0)
    behind = np.roll(ring, -1, axis=0) - ring
    turns = before[:, 0] * behind[:, 1] != before[:, 1] * behind[:, 0]
    corners: np.ndarray = ring[turns]
    return corners
