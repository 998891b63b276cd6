"""Predicted points against references: the radial error of every point, and the report."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from medconv.evaluation.results import Evaluation, plain_number
from medconv.evaluation.scored_cases import ScoredCases
from medconv.features.landmarks.errors import WORDS, cells_of, row_of, summary_of
from medconv.features.landmarks.points import point_files, read_array

_WORST_CASES = 6
_DEFINITIONS = {
    WORDS["mre"]: "mean distance of predicted points to their references, over points that both have.",
    WORDS["within_2mm"]: "of all points of the references; a missed point is not.",
    WORDS["missed"]: "of the points of the references, those without a prediction.",
    WORDS["wrong"]: "of the points that references lack, those predicted nevertheless.",
}


class PointEvaluation(ScoredCases):
    """The scores of points; a row has those of its case, and `points`, a row of `errors`."""

    words = WORDS

    @staticmethod
    def find(path: Path, argument: str) -> dict[str, Path]:
        return point_files(path, argument)

    @classmethod
    def row(cls, case: str, prediction_file: Path, reference_file: Path, targets: Any) -> dict[str, Any]:
        names = targets["names"]
        positions = read_array(prediction_file, case, names)
        reference = read_array(reference_file, case, names)
        points = row_of(positions, np.isfinite(positions).all(1), reference, names)
        scores = summary_of([points])
        return {**{name: scores[name] for name in WORDS}, "points": points}

    @staticmethod
    def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return summary_of([row["points"] for row in rows])

    def cells(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**super().cells(row), **cells_of(row["points"])}

    def score_lines(self) -> list[str]:
        """Also the mean error of each point."""
        per_point = self.result["mean"]["mre_per_point"].items()
        lines = [f"  {name + ' (mm)':<24}{plain_number(mm):>10}" for name, mm in per_point]
        return [*super().score_lines(), *lines]


evaluate = PointEvaluation.of_folders


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of points; without the feature `report` there is none."""
    if not isinstance(evaluation, PointEvaluation) or find_spec("medconv.features.report") is None:
        return None
    from medconv.features.landmarks.views import case_picture
    from medconv.features.report import rendering

    rows = evaluation.result["cases"]
    names = evaluation.result["targets"]["names"]
    # a missed or wrong point is worse than any distance
    worst_first = sorted(rows, key=lambda row: (-_faults(row), -(row["mre"] or 0), row["case"]))
    pictures = {}
    for row in worst_first[:_WORST_CASES]:
        case = row["case"]
        if case in evaluation.images:
            reference, prediction = (read_array(path, case, names) for path in evaluation.files[case][:2])
            pictures[case] = case_picture(evaluation.images[case], reference, prediction, names)
    return rendering.render(
        "points_report.html.j2",
        "medconv.features.landmarks",
        result=evaluation.result,
        rows=worst_first,
        pictures={case: picture for case, picture in pictures.items() if picture},
        names=names,
        words=WORDS,
        definitions=_DEFINITIONS,
    )


def _faults(row: dict[str, Any]) -> int:
    """How many points are missed or wrong."""
    return sum(point["is_there"] != point["is_found"] for point in row["points"].values())
