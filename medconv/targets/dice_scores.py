"""How targets per voxel are scored: Dice of each class or region."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import ClassScores
from medconv.metrics.statistics import describe
from medconv.targets.base import NamedScore, Targets
from medconv.targets.monitor import DICE, MonitoredMetric


class ValidatedCase(NamedTuple):
    """A case with its prediction and its references; shape (X, Y, Z) on the case's original grid.

    Args:
        prediction, reference: label maps.
        raters: label maps of several raters, whose consensus is `reference`; None: this one is missing.
        logits, label: (1, channels, *spatial) on the preprocessed grid, as the loss takes them; logits are
            None unless the targets score probabilities, since those of a CT may not fit into memory.
        annotated: as of `DiceScoredTargets.dice`.
    """

    prediction: np.ndarray
    reference: np.ndarray
    raters: Sequence[np.ndarray | None]
    logits: Tensor | None
    label: Tensor
    annotated: Sequence[bool] | None = None


class DiceScoredTargets(Targets):
    """Targets whose answers are label maps. A row of a checkpoint's `validation` is the Dice of each name."""

    score_title: ClassVar[str] = "Dice"
    monitored: ClassVar[MonitoredMetric] = DICE
    scores_probabilities: ClassVar[bool] = False

    @property
    @abstractmethod
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Name to its label values."""

    @property
    @abstractmethod
    def num_values(self) -> int:
        """Label values are below this number; `ignore` is not counted."""

    def dice(
        self, prediction: np.ndarray, reference: np.ndarray, annotated: Sequence[bool] | None = None
    ) -> ClassScores:
        """Dice of each name; the row of a case in a checkpoint's `validation`. Shape: two label maps.

        Args:
            annotated: of each output; scores of outputs without a reference are undefined (None).
        """
        scores = metrics_dice.dice(prediction, reference, self)
        if annotated is None:
            return scores
        # of exclusive classes, the first output is the background
        name_annotated = annotated[-len(self.names) :]
        pairs = zip(self.names, name_annotated, strict=True)
        return {name: scores[name] if is_annotated else None for name, is_annotated in pairs}

    def row(self, case: ValidatedCase) -> dict[str, Any]:
        """The row of a case in a checkpoint's `validation`."""
        return self.dice(case.prediction, case.reference, case.annotated)

    def logged(
        self, rows: Mapping[str, ClassScores], losses: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        per_class = metrics_dice.mean_per_class(list(rows.values()))
        scores = {"cross_entropy": metrics_dice.mean(losses), "dice": metrics_dice.mean(per_class)}
        scores |= {f"dice/{name}": value for name, value in per_class.items()}
        return scores

    def summary(self, rows: Mapping[str, ClassScores]) -> dict[str, Any]:
        per_class = metrics_dice.mean_per_class(list(rows.values()))
        return {"dice": metrics_dice.mean(per_class), "dice_per_class": per_class}

    def score_table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        per_class = summary.get("val/dice_per_class") or {}
        if not per_class:
            return []
        return [*per_class.items(), ("mean foreground", summary.get("val/dice"))]

    def case_cells(self, row: ClassScores) -> dict[str, float | None]:
        return {f"dice/{name}": value for name, value in row.items()}

    def case_entry(self, row: ClassScores) -> dict[str, Any]:
        return {"dice": row}

    def over_folds(self, folds: Sequence[Mapping[str, ClassScores]]) -> dict[str, Any]:
        rows = [row for fold in folds for row in fold.values()]
        summaries = [self.summary(fold) for fold in folds]
        per_class = {}
        for name in summaries[0]["dice_per_class"]:
            case_values = [row[name] for row in rows]
            fold_values = [summary["dice_per_class"][name] for summary in summaries]
            per_class[name] = _over_cases(case_values, fold_values)
        case_means = [metrics_dice.mean(row) for row in rows]
        fold_means = [summary["dice"] for summary in summaries]
        mean = _over_cases(case_means, fold_means)
        # as `evaluate`: the mean over classes of the means over cases
        class_means = {name: scores["dice"] for name, scores in per_class.items()}
        mean["dice"] = metrics_dice.mean(class_means)
        return {"mean": mean, "per_class": per_class}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        columns = [*scores["per_class"].values(), scores["mean"]]
        keys = {"all cases, mean": "dice", "all cases, sd": "sd", "mean of folds": "mean_of_folds"}
        if any(column["n"] < cases for column in columns):
            keys["defined in"] = "n"
        lines = []
        for title, key in keys.items():
            lines.append((title, [column[key] for column in columns]))
        return lines

    def score_columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        return [*summary["dice_per_class"].items(), ("mean", summary["dice"])]


def _over_cases(case_values: Sequence[float | None], fold_values: Sequence[float | None]) -> dict[str, Any]:
    """The mean Dice over cases with its spread, and the mean of the folds' means."""
    described = describe(case_values)
    return {
        "dice": described["mean"],
        "sd": described["sd"],
        "n": described["n"],
        "low": described["low"],
        "high": described["high"],
        "mean_of_folds": describe(fold_values)["mean"],
    }
