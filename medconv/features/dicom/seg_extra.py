"""What `medconv predict --dicom-seg` adds: each label map as DICOM SEG."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.features.dicom import seg
from medconv.inference.extras import Extra


def of_options(_: argparse.Namespace) -> DicomSeg:
    return DicomSeg()


class DicomSeg(Extra):
    """The label map after post-processing, on the slices of the series."""

    flag = "--dicom-seg"

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        seg.check([case.images[0] for case in cases])

    def settings(self) -> dict[str, Any]:
        return {"dicom_seg": True}

    def write(self, folder: Path, predictor: Any, case: Case, scores: Any, answer: np.ndarray) -> None:
        path = folder / "dicomseg" / f"{case.id}.dcm"
        seg.write(path, answer, case.images[0], predictor.class_names)
