"""Ordinal targets: an image has one of several grades, in an order, such as severities from 0 to 4."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.metrics import image_level
from medconv.metrics.image_level import Columns
from medconv.targets.monitor import MonitoredMetric
from medconv.targets.multiclass import MulticlassTargets


@dataclass(frozen=True)
class OrdinalTargets(MulticlassTargets):
    """Grades in the order of their names; an output for each step between two, so that far misses cost more.

    Source: Frank & Hall 2001, doi:10.1007/3-540-44795-4_13; Cohen 1968, doi:10.1037/h0026256 (kappa).
    """

    kind: ClassVar[str] = "ordinal"
    exclusive: ClassVar[bool] = False
    default_loss: ClassVar[str] = "bce"
    loss_kinds: ClassVar[tuple[str, ...]] = ("multilabel",)
    monitored: ClassVar[MonitoredMetric] = MonitoredMetric("val/quadratic_kappa", "quadratic kappa")
    calibrated: ClassVar[bool] = False  # kappa depends on the highest probability alone
    metric_names: ClassVar[tuple[str, ...]] = ("quadratic_kappa", "grade_error", *image_level.OF_CLASSES)
    output_meaning: ClassVar[str] = (
        "a sigmoid of each output: the probability of a grade above that of its name; differences of these, "
        "made monotone, are the probabilities of the grades"
    )
    name_word: ClassVar[str] = "grade"

    @property
    def num_outputs(self) -> int:
        return len(self.names) - 1

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"above {name}" for name in self.names[:-1])

    def output_counts(self, values: np.ndarray) -> list[int]:
        is_above = values > np.arange(self.num_outputs)
        counts: list[int] = is_above.sum(0).tolist()
        return counts

    def encode(self, label: Tensor) -> Tensor:
        """1 for each step below the grade, else 0."""
        steps = torch.arange(self.num_outputs, device=label.device)
        return (label > steps).float()

    def decode(self, logits: Tensor) -> Tensor:
        # made monotone: a grade above 3 is never more probable than one above 2
        above = torch.sigmoid(logits.float()).cummin(-1).values
        ones = torch.ones_like(above[..., :1])
        # P(grade k) = P(above k - 1) - P(above k); all are above the step before the first grade
        at_least = torch.cat([ones, above], -1)
        more_than = torch.cat([above, 0 * ones], -1)
        return at_least - more_than

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        """Also `grade_error`, the mean distance in grades, and Cohen's kappa with quadratic weights."""
        predicted = outputs.argmax(1).astype(float)
        true = truth[:, 0]
        distance = np.abs(predicted - true)
        total = counts.sum(1)
        mean_predicted = counts @ predicted / total
        mean_true = counts @ true / total
        # What chance would give: the squared distance of two independent draws from the two margins.
        mean_squares = counts @ predicted**2 / total + counts @ true**2 / total
        chance = mean_squares - 2 * mean_predicted * mean_true
        observed = counts @ distance**2 / total
        ordinal_metrics = {
            "quadratic_kappa": 1 - observed / np.where(chance > 0, chance, np.nan),
            "grade_error": counts @ distance / total,
        }
        return ordinal_metrics | super().columns(outputs, truth, counts)

    def shown_output(self, outputs: np.ndarray) -> int:
        # the step into the predicted grade; the first grade has none
        return max(0, int(outputs.argmax()) - 1)
