"""DICOM files as scanners write them, and as they should not be: real files, by pydicom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pydicom = pytest.importorskip("pydicom", reason="the extra `dicom`")
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset  # noqa: E402
from pydicom.sequence import Sequence as Items  # noqa: E402
from pydicom.uid import (  # noqa: E402
    ComputedRadiographyImageStorage,
    EnhancedMRImageStorage,
    ExplicitVRLittleEndian,
    MRImageStorage,
    generate_uid,
)

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
OBLIQUE = tuple(np.round([*(np.array([2, 1, 1]) / 6**0.5), *(np.array([-1, 1, 1]) / 3**0.5)], 9).tolist())
SPACING = (0.7, 0.8)  # between columns, between rows
STEP, THICKNESS = 6.5, 5.0  # as they differ in real files
ORIGIN = (-20.0, 30.5, -7.25)
Edit = Callable[[Any, int], None]


def array(shape: Sequence[int] = (9, 7, 5), seed: int = 0) -> np.ndarray:
    """Signed 16-bit values, no two slices alike; (columns, rows, slices)."""
    return np.random.default_rng(seed).integers(-900, 2000, shape).astype(np.int16)


def one(pixels: np.ndarray, sop_class: str = MRImageStorage, **elements: Any) -> FileDataset:
    """A file of one frame, or of several. Shape: pixels (rows, columns), or with frames first."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = sop_class, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    bits = 8 * pixels.dtype.itemsize
    known: dict[str, Any] = {
        "SOPClassUID": sop_class,
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
        "PatientID": "P1",
        "PatientName": "Test^Person",
        "PatientBirthDate": "19700101",
        "PatientSex": "O",
        "StudyInstanceUID": "1.2.826.0.1.3680043.8.498.1",
        "StudyID": "1",
        "StudyDate": "20240101",
        "StudyTime": "120000",
        "AccessionNumber": "1",
        "ReferringPhysicianName": "",
        "SeriesInstanceUID": "1.2.826.0.1.3680043.8.498.2",
        "SeriesNumber": 3,
        "SeriesDescription": "T1 mprage",
        "FrameOfReferenceUID": "1.2.826.0.1.3680043.8.498.3",
        "PositionReferenceIndicator": "",
        "Manufacturer": "Maker",
        "Modality": "MR",
        "ImageType": ["ORIGINAL", "PRIMARY"],
        "InstanceNumber": 1,
        "Rows": pixels.shape[-2],
        "Columns": pixels.shape[-1],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "PixelData": np.ascontiguousarray(pixels).tobytes(),
    }
    for name, value in {**known, **elements}.items():
        if value is not None:
            setattr(dataset, name, value)
    dataset["PixelData"].VR = "OW" if bits > 8 else "OB"
    return dataset


def save(dataset: FileDataset, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def normal(orientation: Sequence[float]) -> np.ndarray:
    return np.cross(orientation[:3], orientation[3:])


def positions(count: int, orientation: Sequence[float] = AXIAL, step_mm: float = STEP) -> list[np.ndarray]:
    return [np.array(ORIGIN) + z * step_mm * normal(orientation) for z in range(count)]


def series(
    folder: Path,
    voxels: np.ndarray,
    orientation: Sequence[float] = AXIAL,
    edit: Edit | None = None,
    step_mm: float = STEP,
    **elements: Any,
) -> Path:
    """A file a slice; names and instance numbers run against the slices' order. Shape: voxels (columns,
    rows, slices).
    """
    count = voxels.shape[2]
    for z, place in enumerate(positions(count, orientation, step_mm)):
        dataset = one(
            voxels[:, :, z].T,
            **{
                "ImagePositionPatient": [f"{v:.8g}" for v in place],
                "ImageOrientationPatient": list(orientation),
                "PixelSpacing": [SPACING[1], SPACING[0]],
                "SliceThickness": THICKNESS,
                "InstanceNumber": (7 * z) % count + 1,
                **elements,
            },
        )
        if edit is not None:
            edit(dataset, z)
        rank = (
            z // 2 if z % 2 == 0 else (count + 1) // 2 + z // 2
        )  # every other slice first, as some archives have them
        save(dataset, folder / f"IM{999 - rank:04d}.dcm")
    return folder


def affine(orientation: Sequence[float] = AXIAL, step_mm: float = STEP) -> np.ndarray:
    """What `series` means, to right, anterior, superior."""
    matrix = np.eye(4)
    matrix[:3, 0], matrix[:3, 1] = (
        np.array(orientation[:3]) * SPACING[0],
        np.array(orientation[3:]) * SPACING[1],
    )
    matrix[:3, 2], matrix[:3, 3] = step_mm * normal(orientation), ORIGIN
    return np.diag([-1, -1, 1, 1]) @ matrix


def names(folder: Path) -> list[Path]:
    """Files in the order of the slices."""
    files = [(pydicom.dcmread(path).get("ImagePositionPatient"), path) for path in folder.iterdir()]
    return [path for _, path in sorted(files, key=lambda pair: float(np.dot(pair[0], normal(AXIAL))))]


def change(path: Path, **elements: Any) -> Path:
    """Elements of a file set, or taken away where they are None."""
    dataset = pydicom.dcmread(path)
    for name, value in elements.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    dataset.save_as(path)
    return path


def change_one(folder: Path, **elements: Any) -> Path:
    """As `change`, of a slice that is neither the first nor the last."""
    return change(names(folder)[1], **elements)


def with_new_uid(path: Path) -> FileDataset:
    """The content of a file as another instance."""
    content = pydicom.dcmread(path)
    content.SOPInstanceUID = content.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    return content


def item(**elements: Any) -> Items:
    dataset = Dataset()
    for name, value in elements.items():
        setattr(dataset, name, value)
    return Items([dataset])


def enhanced(path: Path, voxels: np.ndarray, order: Sequence[int], b_values: Sequence[float] = (0,)) -> Path:
    """One file of all slices, in this order, each with a slope of its own (1 + slice); a volume for each
    b-value.
    """
    shared, frames, pixels = Dataset(), [], []
    shared.PixelMeasuresSequence = item(PixelSpacing=[SPACING[1], SPACING[0]], SliceThickness=THICKNESS)
    shared.PlaneOrientationSequence = item(ImageOrientationPatient=list(AXIAL))
    places = positions(voxels.shape[2])
    for number, b_value in enumerate(b_values):
        for z in order:
            frame = Dataset()
            frame.PlanePositionSequence = item(ImagePositionPatient=places[z].tolist())
            frame.PixelValueTransformationSequence = item(
                RescaleIntercept=number, RescaleSlope=1 + z, RescaleType="US"
            )
            frame.MRDiffusionSequence = item(DiffusionBValue=b_value)
            frame.FrameContentSequence = item(DimensionIndexValues=[z + 1])
            frames.append(frame)
            pixels.append(voxels[:, :, z].T)
    return save(
        one(
            np.stack(pixels),
            EnhancedMRImageStorage,
            NumberOfFrames=len(frames),
            SharedFunctionalGroupsSequence=Items([shared]),
            PerFrameFunctionalGroupsSequence=Items(frames),
        ),
        path,
    )


def radiograph(path: Path, pixels: np.ndarray, **elements: Any) -> Path:
    """A projection, which has no place in the patient; each is a series. Shape: pixels (rows, columns)."""
    known = {
        "Modality": "CR",
        "SeriesInstanceUID": generate_uid(),
        "ImagerPixelSpacing": [0.2, 0.1],
        "FrameOfReferenceUID": None,
    }
    return save(one(pixels, ComputedRadiographyImageStorage, **{**known, **elements}), path)
