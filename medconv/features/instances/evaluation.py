"""Predicted object maps against those of references: scores of each case, their statistics, a comparison."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from medconv.data.io.grids import on_grid, rounding_doubts
from medconv.evaluation import labels
from medconv.evaluation.case_measurement import LabelMaps, measure_cases
from medconv.evaluation.results import Evaluation, plain_number
from medconv.evaluation.segmentation import reference_set_of
from medconv.features.instances.matching import THRESHOLDS, means_of, row_of, scores_of
from medconv.features.instances.targets import WORDS, InstanceTargets
from medconv.metrics.statistics import describe, paired

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InstanceEvaluation:
    """The result of `evaluate`.

    Args:
        result: the content of the JSON file: `mean` (as `means_of`), `statistics` (score to what `describe`
            returns), `cases` (a row each: that of `matching`, with its scores), `train_cases`,
            `without_prediction`; with `compare` also `compare` (the same for the other predictions) and
            `comparison` (score to what `paired` returns).
        files: case to its reference, its prediction and, with `compare`, its other prediction.
        images: case to image, for cases that have one.
    """

    counted: ClassVar[str] = "references"
    result: dict[str, Any]
    files: Mapping[str, tuple[Path, ...]]
    images: Mapping[str, Path]

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        """The header, then a row per case (with `compare`, of both sets)."""
        columns = ["reference", "predicted", *WORDS]
        yield ["predictions", "case", *columns]
        summaries = [self.result, self.result["compare"]] if "compare" in self.result else [self.result]
        for summary in summaries:
            for row in summary["cases"]:
                yield [summary["predictions"], row["case"], *(row[column] for column in columns)]

    def score_lines(self) -> list[str]:
        """Each score with its interval, the average precision at each threshold, and the counts."""
        mean = self.result["mean"]
        lines = [f"{len(self.result['cases'])} cases, means over those with objects"]
        for name, words in WORDS.items():
            ends = self.result["statistics"][name]
            interval = f"[{plain_number(ends['low'])}, {plain_number(ends['high'])}]"
            lines.append(f"{words:<24}{plain_number(mean[name]):>8}  {interval}")
        pairs = zip(THRESHOLDS, mean["ap_per_threshold"], strict=False)
        lines.append("AP at " + ", ".join(f"{threshold}: {plain_number(ap, 3)}" for threshold, ap in pairs))
        lines.append(f"AP at 0.5 over the objects of all cases together: {plain_number(mean['ap50_pooled'])}")
        lines.append(
            f"{mean['predicted_objects']} predicted objects, {mean['reference_objects']} in references"
        )
        return lines

    def comparison_lines(self) -> list[str]:
        lines = []
        for name, test in self.result["comparison"].items():
            lines.append(
                f"{WORDS[name]}, minus compare: {plain_number(test['difference'])} in {test['n']} "
                f"cases, p {plain_number(test['p'])} (Wilcoxon)"
            )
        return lines


@dataclass(frozen=True)
class ObjectMeasurement:
    """Measures cases of one set of predicted object maps."""

    predictions: LabelMaps
    references: LabelMaps

    def row(self, case: str) -> dict[str, Any]:
        """Raises: ValueError: the case cannot be measured."""
        prediction_file = self.predictions.files[case]
        reference_file = self.references.files[case]
        prediction, prediction_grid = self.predictions.read(case)
        reference, grid = self.references.read(case, prediction_file)
        prediction = on_grid(prediction, reference_file, grid, prediction_file, prediction_grid)
        for doubt in rounding_doubts(reference_file, grid, prediction_file, prediction_grid):
            log.warning("case %s: %s", case, doubt)
        row = row_of(prediction, reference)
        return {"case": case, **row, **scores_of(row)}


def evaluate(
    predictions: Path,
    references: Path,
    compare: Path | None = None,
    workers: int = 1,
    images: Path | None = None,
) -> InstanceEvaluation:
    """Measure every predicted object map against the reference of the same case id.

    Args: as those of `evaluation.segmentation.evaluate`.
    Raises: ValueError: as there.
    """
    sets = [LabelMaps(predictions, labels.case_files(predictions, "predictions"))]
    if compare:
        sets.append(LabelMaps(compare, labels.case_files(compare, "compare")))
    reference_set = reference_set_of(references, sets)
    summaries = [_summary(each, reference_set, workers) for each in sets]
    first = sets[0]
    result = {
        **summaries[0],
        "references": str(references),
        "targets": InstanceTargets().plain(),
        "per_class": {},
        "without_prediction": sorted(set(reference_set.files) - set(first.files)),
    }
    if compare:
        result["compare"] = summaries[1]
        result["comparison"] = _comparison(*summaries)
    all_sets = (reference_set, *sets)
    files = {case: tuple(maps.files[case] for maps in all_sets if case in maps.files) for case in first.files}
    image_files = labels.images_of(first.folder, reference_set.folder, images, list(first.files))
    return InstanceEvaluation(result, files, image_files)


def _summary(predictions: LabelMaps, references: LabelMaps, workers: int) -> dict[str, Any]:
    rows = measure_cases(ObjectMeasurement(predictions, references), workers)
    return {
        "predictions": str(predictions.path),
        "mean": means_of(rows),
        "statistics": {name: describe([row[name] for row in rows]) for name in WORDS},
        "cases": rows,
        "train_cases": labels.train_cases(predictions.folder, [row["case"] for row in rows]),
    }


def _comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The paired test of each score, over the cases that both sets have."""
    others = {row["case"]: row for row in second["cases"]}
    pairs = [(row, others[row["case"]]) for row in first["cases"] if row["case"] in others]
    return {name: paired([a[name] for a, _ in pairs], [b[name] for _, b in pairs]) for name in WORDS}


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of objects; without the feature `report` there is none."""
    if not isinstance(evaluation, InstanceEvaluation) or find_spec("medconv.features.report") is None:
        return None
    from medconv.features.instances.report import write_report

    return write_report(evaluation.result, evaluation.files, evaluation.images)
