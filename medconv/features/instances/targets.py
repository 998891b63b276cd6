"""Objects with a value each: interior and border are learned, and grouped to objects again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from medconv.features.instances.matching import means_of, row_of, scores_of
from medconv.features.instances.objects import BORDER, INTERIOR, classes_of, doubts_of, objects_of
from medconv.metrics.statistics import describe
from medconv.targets.base import Family
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.scores import DiceScores, MonitoredMetric, NamedScore

WORDS = {
    "ap50": "AP at 0.5",
    "ap75": "AP at 0.75",
    "ap": "AP, mean of 0.5 to 0.9",
    "pq": "PQ",
    "dice": "Dice",
}
_COUNTS = ("reference_objects", "predicted_objects")


@dataclass(frozen=True)
class InstanceTargets(LabelMapTargets):
    """Objects; the network's classes are their interior and their border.

    Labels and answers are object maps. A row of a checkpoint's `validation` is that of `matching`.
    """

    kind: ClassVar[str] = "instances"
    family: ClassVar[Family] = Family(evaluate="medconv.features.instances.evaluation:evaluate")
    answers_classes: ClassVar[bool] = False
    can_swap_labels: ClassVar[bool] = False
    monitored: ClassVar[MonitoredMetric] = MonitoredMetric("val/ap", WORDS["ap"])
    loss_kinds: ClassVar[tuple[str, ...]] = ("label_map",)
    output_meaning: ClassVar[str] = (
        "softmax over the channels background, interior and border; an object is an interior that hangs "
        "together by faces, and the border nearest to it, by a watershed seeded with the interiors"
    )
    names: tuple[str, ...] = ("interior", "border")
    values: tuple[tuple[int, ...], ...] = ((INTERIOR,), (BORDER,))

    @classmethod
    def from_fields(cls, content: Mapping[str, Any], **_: Any) -> Self:
        return cls()

    def learned_label(self, label: np.ndarray) -> np.ndarray:
        return classes_of(label)

    def label_doubts(self, label: np.ndarray) -> list[str]:
        return doubts_of(label)

    def answer(self, label: np.ndarray) -> np.ndarray:
        return objects_of(label)

    def dice(
        self, prediction: np.ndarray, reference: np.ndarray, annotated: Sequence[bool] | None = None
    ) -> dict[str, Any]:
        """The row of a case in a checkpoint's `validation`. Shape: two object maps."""
        return row_of(prediction, reference)

    @property
    def scores(self) -> InstanceScores:
        return InstanceScores(self)


class InstanceScores(DiceScores):
    """The scores of object maps."""

    title: ClassVar[str] = "objects"

    def logged(self, rows: Mapping[str, Any], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        summary = self.summary(rows)
        scores = {name: summary.get(name) for name in (*WORDS, *_COUNTS)}
        return {"cross_entropy": describe(list(losses.values()))["mean"], **scores}

    def summary(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        return means_of(list(rows.values()))

    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        lines = [(words, summary.get(f"val/{name}")) for name, words in WORDS.items()]
        return lines if any(value is not None for _, value in lines) else []

    def case_scores(self, rows: Mapping[str, Any]) -> dict[str, float | None]:
        return {case: scores_of(row)["ap"] for case, row in rows.items()}

    def case_cells(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {**scores_of(row), "objects": row["reference"], "predicted_objects": row["predicted"]}

    def case_entry(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return self.case_cells(row)

    def over_folds(self, folds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [row for fold in folds for row in fold.values()]
        fold_means = [self.summary(fold) for fold in folds]
        statistics = {}
        for name in WORDS:
            described = describe([scores_of(row)[name] for row in rows])
            mean_of_folds = describe([means[name] for means in fold_means])["mean"]
            statistics[name] = {**described, "mean_of_folds": mean_of_folds}
        return {"mean": means_of(rows), "per_class": {}, "statistics": statistics}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        columns = scores["statistics"].values()
        keys = {"all cases, mean": "mean", "all cases, sd": "sd", "mean of folds": "mean_of_folds"}
        return [(title, [column[key] for column in columns]) for title, key in keys.items()]

    def columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        return [(words, summary[name]) for name, words in WORDS.items()]
