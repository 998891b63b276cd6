"""Objects with a value each: interior and border are learned, and grouped to objects again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from medconv.features.instances.matching import means_of, row_of, scores_of
from medconv.features.instances.objects import BORDER, INTERIOR, classes_of, doubts_of, objects_of
from medconv.metrics.dice import mean
from medconv.targets.base import Family
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.scores import DiceScores, MonitoredMetric, NamedScores

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
    draws_classes: ClassVar[bool] = True
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


class InstanceScores(NamedScores, DiceScores):
    """The scores of object maps."""

    title: ClassVar[str] = "objects"
    words = WORDS

    def of_case(self, row: Mapping[str, Any]) -> dict[str, float | None]:
        return scores_of(row)

    def means(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return means_of(rows)

    def logged(self, rows: Mapping[str, Any], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        summary = self.summary(rows)
        counts = {name: summary[name] for name in _COUNTS}
        cross_entropy = mean(losses.values())
        return {"cross_entropy": cross_entropy, **super().logged(rows, losses), **counts}

    def case_scores(self, rows: Mapping[str, Any]) -> dict[str, float | None]:
        return {case: scores_of(row)["ap"] for case, row in rows.items()}

    def case_cells(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {**scores_of(row), "objects": row["reference"], "predicted_objects": row["predicted"]}
