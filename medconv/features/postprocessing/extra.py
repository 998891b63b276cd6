"""What `medconv predict --postprocess` adds: steps that change each label map."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case, Grid
from medconv.features.postprocessing.steps import Steps, read
from medconv.inference.extras import Extra
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.digests import digest


def of_options(options: argparse.Namespace) -> PostProcessing:
    """Raises: ValueError: a file that holds no steps."""
    return PostProcessing(read(Path(options.postprocess)))


class PostProcessing(Extra):
    """Args: steps: from a file, or made in Python."""

    flag = "--postprocess"

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        self._steps.check(predictor.targets)

    def settings(self) -> dict[str, Any]:
        # In place of the steps: the file may have been written by hand.
        source = self._steps.source
        return {"postprocess": digest(source) if source else [step.plain() for step in self._steps.steps]}

    def finish(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        return self._steps.apply(label, grid, targets)
