"""What `medconv predict --masks` adds: a file for each class or region."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.data.io.images import label_suffix
from medconv.data.io.writing import write_label
from medconv.inference.extras import Extra
from medconv.targets.segmentation import SegmentationTargets


class MaskFiles(Extra):
    """The label map after post-processing as masks, in the format of the label map."""

    flag = "--masks"

    def __init__(self, _: argparse.Namespace) -> None:
        self._suffix = ""

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        targets = predictor.targets
        if not (isinstance(targets, SegmentationTargets) and targets.of_answers.answers_classes):
            raise ValueError(
                f"{self.flag} is for label maps of classes; this network has {targets.kind} targets"
            )
        no_names = [name for name in targets.of_answers.names if "/" in name or name.startswith(".")]
        if no_names:
            raise ValueError(f"{self.flag}: a class called {no_names[0]!r} cannot be the name of a file")
        self._suffix = label_suffix([case.images[0] for case in cases])

    def settings(self) -> dict[str, Any]:
        return {"masks": True}

    def write(self, folder: Path, predictor: Any, case: Case, scores: Any, answer: np.ndarray) -> None:
        for name, values in predictor.targets.of_answers.by_name.items():
            mask = np.isin(answer, values).astype(np.uint8)
            write_label(folder / "masks" / case.id / f"{name}{self._suffix}", mask, case.images[0])
