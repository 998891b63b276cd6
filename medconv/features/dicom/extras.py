"""What options of `medconv predict` add for DICOM input: each label map as DICOM SEG, or as RTSTRUCT."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.features.dicom import rtstruct, seg
from medconv.features.dicom.files import is_dicom
from medconv.inference.extras import Extra
from medconv.utils.optional_imports import needed


class DicomSeg(Extra):
    """The label map after post-processing as DICOM SEG, on the slices of the series."""

    flag = "--dicom-seg"

    def __init__(self, _: argparse.Namespace) -> None:
        pass

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        images = _series(cases, "a DICOM SEG")
        needed("highdicom", "dicomseg", "writing DICOM SEG", images[0])

    def settings(self) -> dict[str, Any]:
        return {"dicom_seg": True}

    def write(self, folder: Path, predictor: Any, case: Case, scores: Any, answer: np.ndarray) -> None:
        path = folder / "dicomseg" / f"{case.id}.dcm"
        seg.write(path, answer, case.images[0], predictor.class_names)


class RTStruct(Extra):
    """The label map after post-processing as contours on the slices of the series."""

    flag = "--rtstruct"

    def __init__(self, _: argparse.Namespace) -> None:
        pass

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        _series(cases, "an RTSTRUCT")

    def settings(self) -> dict[str, Any]:
        return {"rtstruct": True}

    def write(self, folder: Path, predictor: Any, case: Case, scores: Any, answer: np.ndarray) -> None:
        path = folder / "rtstruct" / f"{case.id}.dcm"
        rtstruct.write(path, answer, case.images[0], predictor.class_names)


def _series(cases: Sequence[Case], written: str) -> list[Path]:
    """The first channel of each case. Raises: ValueError: it is not DICOM, so nothing can refer to it."""
    images = [case.images[0] for case in cases]
    for path in images:
        if not is_dicom(path):
            raise ValueError(f"{path}: {written} refers to a DICOM series, and this is not one")
    return images
