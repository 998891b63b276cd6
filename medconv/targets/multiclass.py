"""Multiclass targets: an image has one of several classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.metrics import image_level, plots
from medconv.metrics.image_level import Columns
from medconv.metrics.segmentation import MetricValues
from medconv.targets.base import finite_number
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.monitor import CROSS_ENTROPY, MonitoredMetric

_MAX_CLASSES = 100  # more different labels are most likely numbers


@dataclass(frozen=True)
class MulticlassTargets(ImageLevelTargets):
    """Classes that exclude each other, softmax; a case has the index of one class."""

    kind: ClassVar[str] = "multiclass"
    exclusive: ClassVar[bool] = True
    default_loss: ClassVar[str] = "cross_entropy"
    monitored: ClassVar[MonitoredMetric] = CROSS_ENTROPY
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
            raise ValueError(
                f"data.target_type={cls.kind} takes one of data.label_columns, got {', '.join(columns)}; "
                "multilabel takes several"
            )
        found = tuple(sorted({*labels[0]} - {""}, key=_sort_key))
        if len(found) > _MAX_CLASSES and not names:
            raise ValueError(
                f"{len(found)} different labels in column {columns[0]!r}, expected classes; for numbers, set "
                "data.target_type=regression"
            )
        if len(found) < 2 and not names:
            raise ValueError(
                f"column {columns[0]!r} holds {', '.join(found) or 'nothing'}, expected two classes or more"
            )
        return cls(tuple(map(str, names)) if names else found)

    def parse(self, labels: Mapping[str, str]) -> tuple[float, ...]:
        ((column, label),) = labels.items()
        if label not in self.names:
            raise ValueError(
                f"column {column!r}: {label!r} is not a class; the classes are {', '.join(self.names)}"
            )
        return (float(self.names.index(label)),)

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        if len(values) == 1 and values[0] not in range(len(self.names)):
            return f"expected the index of one of {len(self.names)} classes, got {values[0]:g}"
        return super().invalid_reason(values)

    def members(self, values: np.ndarray) -> np.ndarray:
        members: np.ndarray = values.astype(int) == np.arange(len(self.names))
        return members

    def decode(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float(), -1)

    def encode(self, label: Tensor) -> Tensor:
        return F.one_hot(label[:, 0].long(), len(self.names)).float()

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        return image_level.multiclass_metrics(outputs, self._predicted(outputs), self.members(truth), counts)

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        return image_level.per_class(self.names, outputs, self._predicted(outputs), self.members(truth))

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """1 - probability of the true class."""
        right: np.ndarray = outputs[self.members(truth)]
        return 1 - right

    def cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float | None]:
        return {"cross_entropy": image_level.log_loss(outputs[self.members(truth)], truth.astype(int))}

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        predicted, member = self._predicted(outputs), self.members(truth)
        right = (predicted & member).any(1)
        scored = slice(1, None) if len(self.names) == 2 else slice(None)  # of two classes, the second
        return {
            "confusion": plots.confusion(self.names, member.T.astype(int) @ predicted),
            "roc": plots.roc(self.names[scored], outputs[:, scored], member[:, scored]),
            "reliability": plots.reliability([("highest probability", outputs.max(1, initial=0), right)]),
        }

    def label_text(self, values: Sequence[float]) -> str:
        return self.names[int(values[0])]

    def prediction_text(self, outputs: Sequence[float]) -> str:
        best = int(np.argmax(outputs))
        return f"{self.names[best]} {outputs[best]:.2f}"

    def label_cells(self, values: Sequence[float]) -> list[Any]:
        return [self.names[int(values[0])]]

    def cells_per_name(self, values: Sequence[float]) -> list[str]:
        return ["x" if values[0] == index else "" for index in range(len(self.names))]

    def prediction_cells(self, outputs: np.ndarray) -> list[str]:
        return [self.names[int(outputs.argmax())]]

    def _predicted(self, outputs: np.ndarray) -> np.ndarray:
        predicted: np.ndarray = outputs.argmax(1)[:, None] == np.arange(outputs.shape[1])
        return predicted


def _sort_key(label: str) -> tuple[float, str]:
    """Numbers by value, then text."""
    number = finite_number(label)
    return (math.inf if number is None else number), label
