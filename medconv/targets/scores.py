"""How answers are scored: what every kind of targets says, the Dice of label maps, and the monitored metric.

The monitored metric is the one of a validation that ranks checkpoints and runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import ClassScores
from medconv.metrics.statistics import describe, interval_of_column_means
from medconv.utils.logging import shown

NamedScore = tuple[str, float | None]  # None: undefined
_WORST_CASES = 3  # that are named


def spread_text(scores: Mapping[str, float | None]) -> str:
    """Standard deviation over cases and the lowest scores; empty if there are no more cases than it names.

    Args:
        scores: of each case; None: undefined.
    """
    defined = {case: score for case, score in scores.items() if score is not None}
    if len(defined) <= _WORST_CASES:
        return ""
    worst = sorted(defined, key=lambda case: (defined[case], case))[:_WORST_CASES]
    named = ", ".join(f"{shown(case)} {defined[case]:.4f}" for case in worst)
    return f"over cases: sd {np.std(list(defined.values()), ddof=1):.4f}, worst {named}"


LARGEST_TEMPERATURE = 100.0  # of the logits of calibrated kinds


class Scores(ABC):
    """The scores of a kind of targets: in logs, summaries, tables, and over the folds of a cross-validation.

    A case has a row: what the validation of every checkpoint keeps of it.

    Args:
        title: what `table` holds.
    """

    title: ClassVar[str] = "scores"

    def temperature(self, rows: Mapping[str, Any]) -> float | None:
        """What to divide logits by, so that answers are not overconfident; None: not `calibrated`.

        Args:
            rows: as of `logged`, with answers of logits that are not divided yet.
        """
        return None

    def at_temperature(self, rows: Mapping[str, Any], temperature: float) -> dict[str, Any]:
        """These rows with the answers of logits that are divided by a temperature."""
        raise NotImplementedError

    @abstractmethod
    def logged(self, rows: Mapping[str, Any], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        """What a validation logs, without `val/`: metric to value; None if undefined.

        Args:
            rows: case id to its row of a checkpoint's `validation`.
            losses: case id to its cross-entropy.
        """

    @abstractmethod
    def summary(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Scores for `summary.json`, without `val/`."""

    @abstractmethod
    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        """Names and values for the terminal; empty: nothing was validated."""

    def case_scores(self, rows: Mapping[str, Any]) -> dict[str, float | None]:
        """The monitored score of each case, the higher the better; empty: cases have none (AUC)."""
        return {}

    @abstractmethod
    def case_cells(self, row: Any) -> dict[str, Any]:
        """Column to cell of a table of cases."""

    @abstractmethod
    def case_entry(self, row: Any) -> dict[str, Any]:
        """The same for JSON."""

    @abstractmethod
    def over_folds(self, folds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Scores of a cross-validation: `mean` and `per_class` over all cases, as `evaluate` writes them, how
        certain they are, and the means of the folds' scores.

        Args:
            folds: the rows of the `validation` of each fold's checkpoint.
        """

    @abstractmethod
    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        """Lines of a table: a title, and a value for each of `columns`.

        Args:
            scores: what `over_folds` returned.
        """

    @abstractmethod
    def columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        """Names and values of a fold, for a table.

        Args:
            summary: what `summary` returned.
        """


class ValidatedCase(NamedTuple):
    """A case with its prediction and its references; shape (X, Y, Z) on the case's original grid.

    Args:
        prediction, reference: label maps.
        raters: label maps of several raters, whose consensus is `reference`; None: this one is missing.
        logits, label: (1, channels, *spatial) on the preprocessed grid, as the loss takes them; logits are
            None unless the targets score probabilities, since those of a CT may not fit into memory.
        annotated: as of `SegmentationTargets.dice`.
    """

    prediction: np.ndarray
    reference: np.ndarray
    raters: Sequence[np.ndarray | None]
    logits: Tensor | None
    label: Tensor
    annotated: Sequence[bool] | None = None


class ComparesLabelMaps(Protocol):
    """What `DiceScores` needs of targets; `SegmentationTargets` has it."""

    def dice(
        self, prediction: np.ndarray, reference: np.ndarray, annotated: Sequence[bool] | None = None
    ) -> ClassScores: ...


@dataclass(frozen=True)
class DiceScores(Scores):
    """The scores of label maps. A row of a checkpoint's `validation` is the Dice of each name."""

    title: ClassVar[str] = "Dice"

    targets: ComparesLabelMaps

    def row(self, case: ValidatedCase) -> dict[str, Any]:
        """The row of a case in a checkpoint's `validation`."""
        return self.targets.dice(case.prediction, case.reference, case.annotated)

    def logged(
        self, rows: Mapping[str, ClassScores], losses: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        # over cases first, then over classes, as in `medconv evaluate`: a rare class counts as much
        per_class = metrics_dice.mean_per_class(list(rows.values()))
        scores = {
            "cross_entropy": metrics_dice.mean(losses.values()),
            "dice": metrics_dice.mean(per_class.values()),
        }
        scores |= {f"dice/{name}": value for name, value in per_class.items()}
        return scores

    def summary(self, rows: Mapping[str, ClassScores]) -> dict[str, Any]:
        per_class = metrics_dice.mean_per_class(list(rows.values()))
        return {"dice": metrics_dice.mean(per_class.values()), "dice_per_class": per_class}

    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        per_class = summary.get("val/dice_per_class") or {}
        if not per_class:
            return []
        return [*per_class.items(), ("mean foreground", summary.get("val/dice"))]

    def case_scores(self, rows: Mapping[str, ClassScores]) -> dict[str, float | None]:
        return {case: metrics_dice.mean(row.values()) for case, row in rows.items()}

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
        case_means = [metrics_dice.mean(row.values()) for row in rows]
        fold_means = [summary["dice"] for summary in summaries]
        mean = _over_cases(case_means, fold_means)
        # as `evaluate`: the mean over classes of the means over cases
        mean["dice"] = metrics_dice.mean(scores["dice"] for scores in per_class.values())
        table = np.array([[row[name] for name in per_class] for row in rows], float)
        defined = table[~np.isnan(table).all(1)]
        mean["low"], mean["high"] = interval_of_column_means(defined)
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

    def columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
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
        "mean_of_folds": metrics_dice.mean(fold_values),
    }


class NamedScores(Scores):
    """The scores of kinds whose cases have a number by each name, such as PSNR; means of them sum cases up.

    Args:
        words: of each score.
    """

    words: ClassVar[Mapping[str, str]]

    @abstractmethod
    def of_case(self, row: Any) -> Mapping[str, float | None]:
        """The scores of a case, by their names. Args: row: of a checkpoint's `validation`."""

    @abstractmethod
    def means(self, rows: Sequence[Any]) -> dict[str, Any]:
        """The mean of each score over cases, and what else sums them up."""

    def logged(self, rows: Mapping[str, Any], losses: Mapping[str, float | None]) -> dict[str, float | None]:
        summary = self.summary(rows)
        return {name: summary.get(name) for name in self.words}

    def summary(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        return self.means(list(rows.values()))

    def table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        keys = {f"val/{name}": words for name, words in self.words.items()}
        return [(words, summary[key]) for key, words in keys.items() if key in summary]

    def case_cells(self, row: Any) -> dict[str, Any]:
        return dict(self.of_case(row))

    def case_entry(self, row: Any) -> dict[str, Any]:
        return self.case_cells(row)

    def over_folds(self, folds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [row for fold in folds for row in fold.values()]
        scores = [self.of_case(row) for row in rows]
        fold_means = [self.summary(fold) for fold in folds]
        statistics = {}
        for name in self.words:
            mean_of_folds = metrics_dice.mean(means.get(name) for means in fold_means)
            described = describe([of_case[name] for of_case in scores])
            statistics[name] = {**described, "mean_of_folds": mean_of_folds}
        return {"mean": self.means(rows), "per_class": {}, "statistics": statistics}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        lines: list[tuple[str, list[Any]]] = []
        lines.append(("all cases, mean", [scores["mean"].get(name) for name in self.words]))
        for title, key in {"all cases, sd": "sd", "mean of folds": "mean_of_folds"}.items():
            lines.append((title, [column[key] for column in scores["statistics"].values()]))
        return lines

    def columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        return [(words, summary.get(name)) for name, words in self.words.items()]


@dataclass(frozen=True)
class MonitoredMetric:
    """The attribute `monitored` of targets.

    Args:
        name: as logged, such as val/dice.
        words: for messages.
        higher_is_better: False for errors and losses.
        smoothing: checkpoints are ranked by a running mean over validations, with this share of the earlier
            ones; 0: by the last validation alone.
    """

    name: str
    words: str
    higher_is_better: bool = True
    smoothing: float = 0.0

    @property
    def best_name(self) -> str:
        """The best value so far, as logged: that of the best checkpoint."""
        return f"{self.name}_best"

    @property
    def mode(self) -> str:
        """`max` or `min`, as early stopping and schedulers call it."""
        return "max" if self.higher_is_better else "min"

    def quality(self, value: float) -> float:
        """The value with the sign that makes larger better."""
        return value if self.higher_is_better else -value

    def plain(self) -> dict[str, str]:
        return {"name": self.name, "words": self.words, "mode": self.mode}


DICE = MonitoredMetric("val/dice", "Dice")
# Unlike an AUC it sees calibration: a network that orders few validation cases well may give all one class.
CROSS_ENTROPY = MonitoredMetric(
    "val/cross_entropy",
    "cross-entropy",
    higher_is_better=False,
    # The best of many validations of few cases may be an early one by chance
    smoothing=0.3,
)
MAE = MonitoredMetric("val/mae", "mean absolute error", higher_is_better=False)


def metric_of_summary(summary: Mapping[str, Any]) -> MonitoredMetric:
    """The metric of the run that wrote a `summary.json`; Dice if it names none."""
    score = summary.get("score")
    if not isinstance(score, Mapping):
        return DICE
    name = score.get("name")
    words = score.get("words")
    mode = score.get("mode")
    if not (isinstance(name, str) and isinstance(words, str) and isinstance(mode, str)):
        return DICE
    return MonitoredMetric(name, words, higher_is_better=mode != "min")
