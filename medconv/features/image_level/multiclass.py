"""Multiclass targets: an image has one of several classes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.features.image_level import calibration, plots
from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.metrics import Columns
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.metrics.segmentation import MetricValues
from medconv.targets.base import finite_number
from medconv.targets.scores import CROSS_ENTROPY, MonitoredMetric
from medconv.utils.errors import Argument, ArgumentError

_NUMBERED = re.compile(r"(\D*)(\d+)(\D*)")  # a grade such as G2
_MAX_CLASSES = 100  # more different labels are most likely numbers


@dataclass(frozen=True)
class MulticlassTargets(ImageLevelTargets):
    """Classes that exclude each other, softmax; a case has the index of one class."""

    kind: ClassVar[str] = "multiclass"
    exclusive: ClassVar[bool] = True
    default_loss: ClassVar[str] = "cross_entropy"
    monitored: ClassVar[MonitoredMetric] = CROSS_ENTROPY
    calibrated: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = image_level.OF_CLASSES
    output_meaning: ClassVar[str] = (
        "softmax over the outputs: probabilities of classes that exclude each other"
    )
    min_names: ClassVar[int] = 2

    @property
    def num_values(self) -> int:
        return 1

    @property
    def value_names(self) -> tuple[str, ...]:
        return ("class",)

    @property
    def default_columns(self) -> tuple[str, ...]:
        return ("label",)

    @property
    def prediction_columns(self) -> tuple[str, ...]:
        return ("predicted",)

    @classmethod
    def from_columns(
        cls, columns: Sequence[str], labels: Sequence[Sequence[str]], names: Sequence[str] | None
    ) -> Self:
        if len(columns) > 1:
            raise ArgumentError(
                "target_type",
                f"={cls.kind} takes one of ",
                Argument("label_columns"),
                f", got {', '.join(columns)}; multilabel takes several",
            )
        if names:
            return cls(tuple(map(str, names)))
        # an empty cell: the case has no label
        different_labels = {*labels[0]} - {""}
        class_names = tuple(sorted(different_labels, key=_sort_key))
        if len(class_names) > _MAX_CLASSES:
            raise ValueError(
                f"{len(class_names)} different labels in column {columns[0]!r}, expected classes; for "
                "numbers, set target_type=regression"
            )
        if len(class_names) < 2:
            raise ValueError(
                f"column {columns[0]!r} holds {', '.join(class_names) or 'nothing'}, expected two classes or "
                "more"
            )
        return cls(class_names)

    def parse(self, labels: Mapping[str, str]) -> tuple[float, ...]:
        ((column, label),) = labels.items()
        if label not in self.names:
            raise ValueError(
                f"column {column!r}: {label!r} is not a class; the classes are {', '.join(self.names)}"
            )
        return (float(self.names.index(label)),)

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        class_indices = range(len(self.names))
        if len(values) == 1 and values[0] not in class_indices:
            return f"expected the index of one of {len(self.names)} classes, got {values[0]:g}"
        return super().invalid_reason(values)

    def members(self, values: np.ndarray) -> np.ndarray:
        class_indices = np.arange(len(self.names))
        members: np.ndarray = values.astype(int) == class_indices
        return members

    def decode(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float(), -1)

    def encode(self, label: Tensor) -> Tensor:
        class_index = label[:, 0].long()
        return F.one_hot(class_index, len(self.names)).float()

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        return image_level.multiclass_metrics(
            outputs, predicted=self._predicted(outputs), positive=self.members(truth), counts=counts
        )

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        return image_level.per_class(
            self.names, outputs, predicted=self._predicted(outputs), positive=self.members(truth)
        )

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """1 - probability of the true class."""
        probability_of_truth: np.ndarray = outputs[self.members(truth)]
        return 1 - probability_of_truth

    def fitted_temperature(self, outputs: np.ndarray, truth: np.ndarray) -> float:
        return calibration.temperature(outputs, truth[:, 0])

    def outputs_at_temperature(self, outputs: np.ndarray, temperature: float) -> np.ndarray:
        return calibration.at_temperature(outputs, temperature)

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        probability_of_truth = outputs[self.members(truth)]
        return {"cross_entropy": image_level.log_loss(probability_of_truth, groups=truth.astype(int))}

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        predicted = self._predicted(outputs)
        members = self.members(truth)
        is_right = (predicted & members).any(1)
        highest = outputs.max(1, initial=0)
        # of two classes, only the curve of the second, the positive one
        drawn = slice(1, None) if len(self.names) == 2 else slice(None)
        curves = list(zip(self.names[drawn], outputs[:, drawn].T, members[:, drawn].T, strict=True))
        true_by_predicted = members.T.astype(int) @ predicted  # cases
        return {
            "confusion": plots.confusion(self.names, true_by_predicted),
            "roc": plots.roc(curves),
            "precision_recall": plots.precision_recall(curves),
            "reliability": plots.reliability([("highest probability", highest, is_right)]),
        }

    def label_text(self, values: Sequence[float]) -> str:
        return self.names[int(values[0])]

    def prediction_text(self, outputs: Sequence[float]) -> str:
        best = int(np.argmax(outputs))
        return f"{self.names[best]} {outputs[best]:.2f}"

    def label_cells(self, values: Sequence[float]) -> list[Any]:
        return [self.names[int(values[0])]]

    def cells_per_name(self, values: Sequence[float]) -> list[str]:
        class_indices = range(len(self.names))
        return ["x" if values[0] == index else "" for index in class_indices]

    def prediction_cells(self, outputs: np.ndarray) -> list[str]:
        return [self.names[int(outputs.argmax())]]

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        """One-hot over the class of the highest probability. Shape: (cases, classes) -> the same, bool."""
        # of equal probabilities, the first class
        predicted_class = outputs.argmax(1)[:, None]
        predicted: np.ndarray = predicted_class == np.arange(outputs.shape[1])
        return predicted


def _sort_key(label: str) -> tuple[float, str]:
    """Numbers by value, then text."""
    number = finite_number(label)
    return math.inf if number is None else number, label


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

    @classmethod
    def from_columns(
        cls, columns: Sequence[str], labels: Sequence[Sequence[str]], names: Sequence[str] | None
    ) -> Self:
        found = super().from_columns(columns, labels, names)
        if names or all(finite_number(name) is not None for name in found.names):
            return found
        numbers = {name: match for name in found.names if (match := _NUMBERED.fullmatch(name))}
        around = {(match[1], match[3]) for match in numbers.values()}
        if len(numbers) < len(found.names) or len(around) > 1:
            raise ArgumentError(
                "class_names",
                f" is needed: column {columns[0]!r} holds grades in words, {', '.join(found.names)}, whose "
                "order is not known; list them from the lowest to the highest",
            )
        return cls(tuple(sorted(numbers, key=lambda name: int(numbers[name][2]))))

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
