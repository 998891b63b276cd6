"""Multilabel targets: an image may have several labels, or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level import plots
from medconv.features.image_level.metrics import Columns
from medconv.features.image_level.targets import NumberTargets
from medconv.metrics import calibration
from medconv.metrics.segmentation import MetricValues
from medconv.targets.monitor import CROSS_ENTROPY, MonitoredMetric

_FLOAT32_STEP = 2.0**-25  # half the distance of the float32 below 1
_BOOLEANS = {"true": "1", "false": "0"}  # as pandas writes them


@dataclass(frozen=True)
class MultilabelTargets(NumberTargets):
    """Independent labels, a sigmoid each; a case has 0 or 1 for each."""

    kind: ClassVar[str] = "multilabel"
    exclusive: ClassVar[bool] = False
    default_loss: ClassVar[str] = "bce"
    monitored: ClassVar[MonitoredMetric] = CROSS_ENTROPY
    calibrated: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = image_level.OF_CLASSES
    name_word: ClassVar[str] = "label"
    output_meaning: ClassVar[str] = (
        "a sigmoid of each output: probabilities of labels that may occur together"
    )

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        are_binary = set(values) <= {0.0, 1.0}
        if len(values) == len(self.names) and not are_binary:
            return f"expected 0 or 1 for each of {', '.join(self.names)}, got {list(values)}"
        return super().invalid_reason(values)

    def _parse(self, column: str, label: str) -> float:
        number_text = _BOOLEANS.get(label.lower(), label)
        return super()._parse(column, number_text)

    def cell_error(self, number: float) -> str | None:
        return None if number in (0, 1) else "0 or 1"

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
        has_both = members.any(0) & ~members.all(0)  # positive and negative cases, per label
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
        for scores, positive in zip(outputs.T, self.members(truth).T, strict=True):
            rows.append(image_level.multilabel_metrics(scores, positive, counts))
        return image_level.mean_of(rows)

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        return image_level.per_class(
            self.names, outputs, predicted=self._predicted(outputs), positive=self.members(truth)
        )

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The largest 1 - probability of the truth over labels."""
        distances = np.abs(outputs - self.members(truth))
        errors: np.ndarray = distances.max(1)
        return errors

    def fitted_temperature(self, outputs: np.ndarray, truth: np.ndarray) -> float:
        return calibration.temperature(_absent_or_present(outputs), self.members(truth))

    def outputs_at_temperature(self, outputs: np.ndarray, temperature: float) -> np.ndarray:
        scaled = calibration.at_temperature(_absent_or_present(outputs), temperature)
        present: np.ndarray = scaled[..., 1]
        return present

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        is_positive = self.members(truth)
        probability_of_truth = np.where(is_positive, outputs, 1 - outputs)
        # two groups for each label: its negative and its positive cases
        groups = 2 * np.arange(len(self.names)) + is_positive
        return {"cross_entropy": image_level.log_loss(probability_of_truth, groups)}

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        predicted = self._predicted(outputs)
        positive = self.members(truth)
        curves = list(zip(self.names, outputs.T, positive.T, strict=True))
        return {
            "confusion": plots.right_and_wrong(self.names, predicted, positive),
            "roc": plots.roc(self.names, outputs, positive),
            "precision_recall": plots.precision_recall(self.names, outputs, positive),
            "reliability": plots.reliability(curves),
        }

    def label_text(self, values: Sequence[float]) -> str:
        named_values = zip(self.names, values, strict=True)
        return ", ".join(name for name, value in named_values if value) or "nothing"

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
