"""Predicted points against references: the radial error of every point, and the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.datasets.patterns import home
from medconv.evaluation.labels import train_cases
from medconv.evaluation.results import Evaluation, plain_number
from medconv.features.landmarks.errors import WORDS, Row, row_of, summary_of, told
from medconv.features.landmarks.points import point_files, read_array, read_points
from medconv.inference.output import read_manifest
from medconv.metrics import statistics
from medconv.utils.logging import some

_DEFINITIONS = {
    WORDS["mre"]: "mean distance of predicted points to their references, over points that both have.",
    WORDS["within_2mm"]: "of all points of the references; a missed point is not.",
    WORDS["missed"]: "of the points of the references, those without a prediction.",
    WORDS["wrong"]: "of the points that references lack, those predicted nevertheless.",
}


@dataclass(frozen=True)
class PointEvaluation:
    """The result of `evaluate`.

    Args:
        result: the content of the JSON file: `mean` (the scores of `WORDS`, and `mre_per_point`), `cases` (a
            row each), `targets`, `train_cases`, `without_prediction`; with `compare` also `compare` and
            `comparison`, the paired test of the cases' mean radial errors.
    """

    counted: ClassVar[str] = "references"
    result: dict[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.result["mean"]["mre_per_point"])

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        yield ["case", *(f"error_mm/{name}" for name in self.names), "missed", "wrong"]
        for row in self.result["cases"]:
            errors = [row["error_mm"][name] for name in self.names]
            yield [row["case"], *errors, " ".join(row["missed"]), " ".join(row["wrong"])]

    def score_lines(self) -> list[str]:
        mean = self.result["mean"]
        lines = [f"{len(self.result['cases'])} cases"]
        lines += [f"{words:<28}{plain_number(mean[name]):>10}" for name, words in WORDS.items()]
        per_point = mean["mre_per_point"].items()
        return lines + [f"  {name + ' (mm)':<26}{plain_number(mm):>10}" for name, mm in per_point]

    def comparison_lines(self) -> list[str]:
        row = self.result["comparison"]["mre"]
        cells = ", ".join(f"{key} {plain_number(row[key])}" for key in ("difference", "low", "high", "p"))
        return [f"{WORDS['mre']} of cases, predictions minus compare: {cells}"]


def evaluate(
    predictions: Path,
    references: Path,
    compare: Path | None = None,
    workers: int = 1,
    images: Path | None = None,
) -> PointEvaluation:
    """Measure every predicted point against the reference of the same case and name.

    Args:
        predictions, references, compare: folders of points, or patterns with `{id}`.
        workers, images: without effect on files this small; the report shows no images.
    Raises:
        ValueError: predictions without a reference, or as `read_array`.
    """
    reference_files = point_files(references, "references")
    manifest = read_manifest(home(predictions)).get("targets") or {}
    names = manifest.get("names") or sorted(set().union(*map(read_points, reference_files.values())))
    rows_of_sets: dict[Path, dict[str, Row]] = {}
    for path in filter(None, (predictions, compare)):
        files = point_files(path, "predictions" if path is predictions else "compare")
        missing = sorted(set(files) - set(reference_files))
        if missing:
            raise ValueError(f"references {references}: no points there for {some(missing, 20)}")
        rows_of_sets[path] = {}
        for case, file in files.items():
            positions = read_array(file, names)
            found = np.isfinite(positions).all(1)
            rows_of_sets[path][case] = row_of(
                positions, found, read_array(reference_files[case], names), names
            )
    rows = rows_of_sets[predictions]
    result = {
        **_summary(predictions, rows),
        "references": str(references),
        "targets": manifest or None,
        "without_prediction": sorted(set(reference_files) - set(rows)),
    }
    if compare is not None:
        others = rows_of_sets[compare]
        result["compare"] = _summary(compare, others)
        shared = [case for case in rows if case in others]
        of_cases = [[summary_of([each[case]])["mre"] for case in shared] for each in (rows, others)]
        result["comparison"] = {"mre": statistics.paired(*of_cases)}
    return PointEvaluation(result)


def _summary(path: Path, rows: Mapping[str, Row]) -> dict[str, Any]:
    return {
        "predictions": str(path),
        "mean": summary_of(list(rows.values())),
        "per_class": {},
        "cases": [{"case": case, **told(row)} for case, row in rows.items()],
        "train_cases": train_cases(home(path), list(rows)),
    }


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of points; without the feature `report` there is none."""
    if not isinstance(evaluation, PointEvaluation) or find_spec("medconv.features.report") is None:
        return None
    from medconv.features.report import rendering

    return rendering.render(
        "points_report.html.j2",
        "medconv.features.landmarks",
        result=evaluation.result,
        names=evaluation.names,
        words=WORDS,
        definitions=_DEFINITIONS,
    )
