"""How targets of whole images are scored: the metrics of a kind, over validation cases and over folds."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from medconv.metrics import image_level
from medconv.metrics.image_level import Columns
from medconv.metrics.segmentation import MetricValues
from medconv.metrics.statistics import describe
from medconv.targets.base import NamedScore, Targets

# a row of `validation`: `outputs`, decoded, and `values`, the case's label
CaseOutputs = dict[str, list[float]]
_MAX_NAMES = 20  # rows of a table


class ImageLevelScoredTargets(Targets):
    """Targets whose answers are a row of a table. A kind implements the abstract methods.

    Args:
        metric_names: the keys of `columns`.
    """

    metric_names: ClassVar[tuple[str, ...]]

    @property
    def num_values(self) -> int:
        """Values of a case: one for each name, or the index of its class."""
        return len(self.names)

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of the values of a case, for columns of tables."""
        return self.names

    @abstractmethod
    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        """The metrics of `metric_names`, for each sample of cases.

        Shape: outputs (cases, names), truth (cases, values), counts (samples, cases): how often each sample
        has each case -> per metric (samples,).
        """

    @abstractmethod
    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        """Metrics of each class, label or number. Shape: as in `columns`."""

    @abstractmethod
    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The error of each case, to find the worst ones. Shape: as in `columns` -> (cases,)."""

    @abstractmethod
    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        """Plots over all cases, by name; each (height, width, 3) uint8. Shape: as in `columns`."""

    def arrays(self, rows: Sequence[Mapping[str, Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
        """Outputs (cases, names) and labels (cases, values) of rows of `validation`."""
        outputs = np.array([row["outputs"] for row in rows], float)
        values = np.array([row["values"] for row in rows], float)
        # reshaped, as without rows both are of one axis
        outputs = outputs.reshape(len(rows), len(self.names))
        values = values.reshape(len(rows), self.num_values)
        return outputs, values

    def temperature(self, rows: Mapping[str, CaseOutputs]) -> float | None:
        if not self.calibrated:
            return None
        outputs, truth = self.arrays(list(rows.values()))
        is_finite = np.isfinite(outputs).all(1)
        return self.fitted_temperature(outputs[is_finite], truth[is_finite]) if is_finite.any() else 1.0

    def at_temperature(self, rows: Mapping[str, CaseOutputs], temperature: float) -> dict[str, CaseOutputs]:
        outputs, _ = self.arrays(list(rows.values()))
        scaled = self.outputs_at_temperature(outputs, temperature).tolist()
        return {
            case: {**row, "outputs": case_outputs}
            for (case, row), case_outputs in zip(rows.items(), scaled, strict=True)
        }

    def fitted_temperature(self, outputs: np.ndarray, truth: np.ndarray) -> float:
        """`calibration.temperature`, of calibrated kinds. Shape: as in `columns`."""
        raise NotImplementedError

    def outputs_at_temperature(self, outputs: np.ndarray, temperature: float) -> np.ndarray:
        """`calibration.at_temperature`, of calibrated kinds. Shape: (cases, names)."""
        raise NotImplementedError

    def logged(
        self, rows: Mapping[str, CaseOutputs], losses: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        return self.summary(rows)

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        """Key `cross_entropy`: `image_level.log_loss` with classes as groups; empty: not defined."""
        return {}

    def summary(self, rows: Mapping[str, CaseOutputs]) -> dict[str, Any]:
        if not rows:
            return {}
        outputs, truth = self.arrays(list(rows.values()))
        # With the monitored metric, which ranks the runs of a sweep
        return {**image_level.measure(self, outputs, truth), **self.cross_entropy(outputs, truth)}

    def score_table(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        scores = []
        for name in self.metric_names:
            if f"val/{name}" in summary:
                title = name.replace("_", " ")
                scores.append((title, summary[f"val/{name}"]))
        return scores

    def case_cells(self, row: CaseOutputs) -> dict[str, float]:
        truth = zip(self.value_names, row["values"], strict=True)
        outputs = zip(self.names, row["outputs"], strict=True)
        cells = {f"truth/{name}": value for name, value in truth}
        cells |= {f"output/{name}": value for name, value in outputs}
        return cells

    def case_entry(self, row: CaseOutputs) -> dict[str, Any]:
        return dict(row)

    def scores(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        """`mean`: metric to value; `intervals`: metric to its 95 % interval; `per_class`: as `per_name`."""
        intervals = image_level.intervals(self, outputs, truth)
        return {
            "mean": image_level.measure(self, outputs, truth),
            "intervals": {name: list(ends) for name, ends in intervals.items()},
            "per_class": self.per_name(outputs, truth),
        }

    def over_folds(self, folds: Sequence[Mapping[str, CaseOutputs]]) -> dict[str, Any]:
        rows = [row for fold in folds for row in fold.values()]
        summaries = [self.summary(fold) for fold in folds]
        means = {}
        for name in self.metric_names:
            fold_values = [summary[name] for summary in summaries]
            means[name] = describe(fold_values)["mean"]
        outputs, truth = self.arrays(rows)
        return {**self.scores(outputs, truth), "mean_of_folds": means}

    def over_folds_lines(self, scores: Mapping[str, Any], cases: int) -> list[tuple[str, list[Any]]]:
        undefined = (None, None)
        intervals = [scores["intervals"].get(name, undefined) for name in scores["mean"]]
        return [
            ("all cases", list(scores["mean"].values())),
            ("mean of folds", list(scores["mean_of_folds"].values())),
            ("95 % from", [low for low, _ in intervals]),
            ("95 % to", [high for _, high in intervals]),
        ]

    def score_columns(self, summary: Mapping[str, Any]) -> list[NamedScore]:
        return [(name, summary[name]) for name in self.metric_names]

    def score_text(self, outputs: np.ndarray, truth: np.ndarray) -> str:
        """Markdown tables of the scores, and of the number of cases of each class or label."""
        lines = [f"{len(truth)} cases, {self.kind}", "", "| score | |", "|---|---|"]
        for metric, value in image_level.measure(self, outputs, truth).items():
            cell = "-" if value is None else f"{value:.4f}"
            lines.append(f"| {metric} | {cell} |")
        counts = self.class_counts(truth)
        if counts is not None:
            lines += ["", "| name | cases |", "|---|---|"]
            rows = list(zip(self.names, counts, strict=True))
            lines += [f"| {name} | {count} |" for name, count in rows[:_MAX_NAMES]]
        return "\n".join(lines)
