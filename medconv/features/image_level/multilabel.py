"""Multilabel targets: an image may have several labels, or none."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.features.image_level import calibration, plots
from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.metrics import Columns
from medconv.features.image_level.targets import NumberTargets
from medconv.metrics.segmentation import MetricValues
from medconv.targets.scores import CROSS_ENTROPY, MonitoredMetric

_FLOAT32_STEP = 2.0**-25  # half the distance of the float32 below 1
_CERTAIN = 40.0  # a logit; its binary cross-entropy is 4e-18
_MISSING = ("", "-1", "-1.0")  # CheXpert writes -1 where a radiologist was not certain
_BOOLEANS = {"true": "1", "false": "0"}  # as pandas writes them


@dataclass(frozen=True)
class MultilabelTargets(NumberTargets):
    """Independent labels, a sigmoid each; a case has 0 or 1 for each, or NaN: the finding is missing.

    The loss and all metrics leave a missing finding out.
    """

    kind: ClassVar[str] = "multilabel"
    exclusive: ClassVar[bool] = False
    default_loss: ClassVar[str] = "bce"
    monitored: ClassVar[MonitoredMetric] = CROSS_ENTROPY
    calibrated: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = image_level.OF_CLASSES
    name_word: ClassVar[str] = "label"
    takes_missing: ClassVar[bool] = True
    output_meaning: ClassVar[str] = (
        "a sigmoid of each output: probabilities of labels that may occur together"
    )

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        known = [value for value in values if not math.isnan(value)]
        if len(values) != len(self.names):
            return super().invalid_reason(values)
        if not known:
            return "all of its findings are missing, expected 0 or 1 for one at least"
        if not set(known) <= {0.0, 1.0}:
            return f"expected 0 or 1 for each of {', '.join(self.names)}, got {list(values)}"
        return None

    def _parse(self, column: str, label: str) -> float:
        if label in _MISSING:
            return math.nan
        return super()._parse(column, _BOOLEANS.get(label.lower(), label))

    def cell_error(self, number: float) -> str | None:
        return None if number in (0, 1) else "0 or 1, or -1 or nothing where the finding is not known"

    def members(self, values: np.ndarray) -> np.ndarray:
        return values > 0

    def balanced_groups(self, values: np.ndarray) -> list[np.ndarray]:
        """The positive cases of each label, then the cases without any."""
        groups = super().balanced_groups(values)
        without_label = ~self.members(values).any(1)
        return [*groups, np.flatnonzero(without_label)]

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        # training needs positive cases alone; an AUC in validation needs negative ones, too
        if split == "training":
            return super().check_examples(values, split)
        members = self.members(values)
        has_both = members.any(0) & (values == 0).any(0)  # positive and negative cases, per label
        if not has_both.any():
            raise ValueError(
                "no label has both positive and negative validation cases, so there is no AUC to choose a "
                "checkpoint by"
            )
        missing = self.missing(values)
        if not missing:
            return None
        return f"no validation case has {', '.join(missing)}, so its AUC is undefined"

    def decode(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits.float())

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        rows = []
        for scores, true in zip(outputs.T, truth.T, strict=True):
            known = ~np.isnan(true)
            rows.append(image_level.multilabel_metrics(scores[known], true[known] > 0, counts[:, known]))
        return image_level.mean_of(rows)

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        metrics: dict[str, MetricValues] = {}
        for index, name in enumerate(self.names):
            known = ~np.isnan(truth[:, index])
            column = outputs[known, index : index + 1]
            positive = self.members(truth[known, index : index + 1])
            metrics |= image_level.per_class((name,), column, self._predicted(column), positive)
        return metrics

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The largest 1 - probability of the truth over known labels."""
        distances = np.where(np.isnan(truth), 0, np.abs(outputs - self.members(truth)))
        errors: np.ndarray = distances.max(1)
        return errors

    def fitted_temperature(self, outputs: np.ndarray, truth: np.ndarray) -> float:
        known = ~np.isnan(truth)
        return calibration.temperature(_absent_or_present(outputs)[known], self.members(truth)[known])

    def outputs_at_temperature(self, outputs: np.ndarray, temperature: float) -> np.ndarray:
        scaled = calibration.at_temperature(_absent_or_present(outputs), temperature)
        present: np.ndarray = scaled[..., 1]
        return present

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        known = ~np.isnan(truth)
        is_positive = self.members(truth)
        probability_of_truth = np.where(is_positive, outputs, 1 - outputs)
        # two groups for each label: its negative and its positive cases
        groups = 2 * np.arange(len(self.names)) + is_positive
        return {"cross_entropy": image_level.log_loss(probability_of_truth[known], groups[known])}

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        known = ~np.isnan(truth)
        predicted = self._predicted(outputs)
        positive = self.members(truth)
        curves = [
            (name, outputs[known[:, index], index], positive[known[:, index], index])
            for index, name in enumerate(self.names)
        ]
        return {
            "confusion": plots.right_and_wrong(self.names, predicted, positive, known),
            "roc": plots.roc(curves),
            "precision_recall": plots.precision_recall(curves),
            "reliability": plots.reliability(curves),
        }

    def label_text(self, values: Sequence[float]) -> str:
        named_values = zip(self.names, values, strict=True)
        texts = [f"{name} unknown" if math.isnan(value) else name for name, value in named_values if value]
        return ", ".join(texts) or "nothing"

    def label_cells(self, values: Sequence[float]) -> list[Any]:
        return self.label_values(values)

    def cells_per_name(self, values: Sequence[float]) -> list[str]:
        return ["-" if math.isnan(value) else f"{value:.4g}" for value in values]

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        # A missing finding counts as answered rightly beyond doubt, so that it has no gradient
        missing = encoded.isnan()
        of_all = loss(outputs.masked_fill(missing, _CERTAIN), encoded.masked_fill(missing, 1.0))
        # and no loss: with label smoothing, being sure costs something
        certain = torch.full_like(encoded, _CERTAIN)
        return of_all - missing.float().mean() * loss(certain, torch.ones_like(encoded))

    def output_counts(self, values: np.ndarray) -> list[int] | None:
        """As if all cases had each finding known, so that weights of present and absent ones are those of the
        known cases.
        """
        known = (~np.isnan(values)).sum(0).clip(1)
        return [
            round(int(count) * len(values) / num)
            for count, num in zip(self.members(values).sum(0), known, strict=True)
        ]

    def prediction_text(self, outputs: Sequence[float]) -> str:
        is_predicted = self._predicted(np.array(outputs))
        labels = zip(self.names, outputs, is_predicted, strict=True)
        texts = [f"{name} {probability:.2f}" for name, probability, predicted in labels if predicted]
        return ", ".join(texts) or "nothing"

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        return outputs > image_level.THRESHOLD


def _absent_or_present(outputs: np.ndarray) -> np.ndarray:
    """The two probabilities of each label. Shape: (cases, labels) -> (cases, labels, 2)."""
    present = np.asarray(outputs, np.float64)
    # Else a float32 that was rounded to 1 would say that absence is impossible
    absent = (1 - present).clip(_FLOAT32_STEP)
    return np.stack([absent, present], -1)
