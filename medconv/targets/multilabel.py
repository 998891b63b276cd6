"""Multilabel targets: an image may have several labels, or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.metrics import image_level, plots
from medconv.metrics.image_level import Columns
from medconv.metrics.segmentation import MetricValues
from medconv.targets.monitor import CROSS_ENTROPY, MonitoredMetric
from medconv.targets.numbers import NumberTargets

_BOOLEANS = {"true": "1", "false": "0"}  # as pandas writes them


@dataclass(frozen=True)
class MultilabelTargets(NumberTargets):
    """Independent labels, a sigmoid each; a case has 0 or 1 for each."""

    kind: ClassVar[str] = "multilabel"
    exclusive: ClassVar[bool] = False
    default_loss: ClassVar[str] = "bce"
    monitored: ClassVar[MonitoredMetric] = CROSS_ENTROPY
    metric_names: ClassVar[tuple[str, ...]] = image_level.OF_CLASSES
    name_word: ClassVar[str] = "label"
    output_meaning: ClassVar[str] = (
        "a sigmoid of each output: probabilities of labels that may occur together"
    )

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        if len(values) == len(self.names) and not set(values) <= {0.0, 1.0}:
            return f"expected 0 or 1 for each of {', '.join(self.names)}, got {list(values)}"
        return super().invalid_reason(values)

    def _parse(self, column: str, label: str) -> float:
        return super()._parse(column, _BOOLEANS.get(label.lower(), label))

    def cell_error(self, number: float) -> str | None:
        return None if number in (0, 1) else "0 or 1"

    def members(self, values: np.ndarray) -> np.ndarray:
        return values > 0

    def balanced_groups(self, values: np.ndarray) -> list[np.ndarray]:
        """The positive cases of each label, then the cases without any."""
        groups = super().balanced_groups(values)
        return [*groups, np.flatnonzero(~self.members(values).any(1))]

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        if split == "training":
            return super().check_examples(values, split)
        members = self.members(values)
        if not (members.any(0) & ~members.all(0)).any():
            raise ValueError(
                "no finding has both positive and negative validation cases, so there is no AUC to choose a "
                "checkpoint by; another data.fold or data.num_folds may help"
            )
        missing = self.missing(values)
        return f"no validation case has {', '.join(missing)}, so its AUC is undefined" if missing else None

    def decode(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits.float())

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        pairs = zip(outputs.T, self.members(truth).T, strict=True)
        return image_level.mean_of([image_level.multilabel_metrics(o, t, counts) for o, t in pairs])

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        return image_level.per_class(self.names, outputs, self._predicted(outputs), self.members(truth))

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The largest 1 - probability of the truth over labels."""
        errors: np.ndarray = np.abs(outputs - self.members(truth)).max(1)
        return errors

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        present = self.members(truth)
        groups = 2 * np.arange(len(self.names)) + present
        return {"cross_entropy": image_level.log_loss(np.where(present, outputs, 1 - outputs), groups)}

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        predicted, member = self._predicted(outputs), self.members(truth)
        curves = list(zip(self.names, outputs.T, member.T, strict=True))
        return {
            "confusion": plots.right_and_wrong(self.names, predicted, member),
            "roc": plots.roc(self.names, outputs, member),
            "reliability": plots.reliability(curves),
        }

    def label_text(self, values: Sequence[float]) -> str:
        present = (name for name, value in zip(self.names, values, strict=True) if value)
        return ", ".join(present) or "nothing"

    def prediction_text(self, outputs: Sequence[float]) -> str:
        rows = zip(self.names, outputs, self._predicted(np.array(outputs)), strict=True)
        return ", ".join(f"{name} {value:.2f}" for name, value, positive in rows if positive) or "nothing"

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        return outputs > image_level.THRESHOLD
