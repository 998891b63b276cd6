"""Predicted object maps against those of references: scores of each case, their statistics, a comparison."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.images import read_label
from medconv.evaluation.results import Evaluation, plain_number
from medconv.evaluation.scored_cases import ScoredCases
from medconv.features.instances.matching import THRESHOLDS, means_of, row_of, scores_of
from medconv.features.instances.targets import WORDS


class InstanceEvaluation(ScoredCases):
    """The scores of object maps; a row is that of `matching`, with its scores."""

    words = WORDS
    counts = ("reference", "predicted")

    @staticmethod
    def read(path: Path, like: Path | None = None) -> tuple[np.ndarray, Grid]:
        return read_label(path, like)

    @staticmethod
    def measure(prediction: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
        row = row_of(prediction, reference)
        return {**row, **scores_of(row)}

    @staticmethod
    def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return means_of(rows)

    def score_lines(self) -> list[str]:
        """Also the average precision at each threshold, and the counts."""
        mean = self.result["mean"]
        first, *lines = super().score_lines()
        lines = [f"{first}, means over those with objects", *lines]
        pairs = zip(THRESHOLDS, mean["ap_per_threshold"], strict=False)
        precisions = ", ".join(f"{threshold}: {plain_number(ap, 3)}" for threshold, ap in pairs)
        lines.append(f"AP at {precisions or 'any threshold: -'}")
        lines.append(f"AP at 0.5 over the objects of all cases together: {plain_number(mean['ap50_pooled'])}")
        lines.append(
            f"{mean['predicted_objects']} predicted objects, {mean['reference_objects']} in references"
        )
        return lines


evaluate = InstanceEvaluation.of_folders


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of objects; without the feature `report` there is none."""
    if not isinstance(evaluation, InstanceEvaluation) or find_spec("medconv.features.report") is None:
        return None
    from medconv.features.instances.report import write_report

    return write_report(evaluation.result, evaluation.files, evaluation.images)
