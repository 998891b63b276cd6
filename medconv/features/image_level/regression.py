"""Regression targets: one or several numbers per image, in any unit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level import plots
from medconv.features.image_level.metrics import Columns
from medconv.features.image_level.output_scaling import in_units
from medconv.features.image_level.targets import NumberTargets
from medconv.metrics.segmentation import MetricValues
from medconv.targets.scores import MAE, MonitoredMetric

_CONSTANT = 1e-12  # a spread below this share of the largest value is rounding error


@dataclass(frozen=True)
class RegressionTargets(NumberTargets):
    """Numbers, in the units of the labels.

    For the loss they are standardised, so that it does not depend on units; networks return units.

    Args:
        means: of each number over the training cases; empty: 0.
        stds: of each number over the training cases; empty: 1.
    """

    kind: ClassVar[str] = "regression"
    exclusive: ClassVar[bool] = False
    default_loss: ClassVar[str] = "huber"
    monitored: ClassVar[MonitoredMetric] = MAE
    metric_names: ClassVar[tuple[str, ...]] = image_level.OF_NUMBERS
    name_word: ClassVar[str] = "number"
    output_meaning: ClassVar[str] = "the outputs are the numbers themselves, in the units of training"
    unbounded: ClassVar[bool] = True
    means: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        targets = super().from_fields(content)
        means = _list_of(content.get("means") or ())
        stds = _list_of(content.get("stds") or ())
        are_finite = all(_is_finite(value) for value in (*means, *stds))
        counts = {len(means), len(stds)}
        is_complete = counts in ({0}, {len(targets.names)})
        if not are_finite or not is_complete or not all(std > 0 for std in stds):
            raise ValueError("regression targets need a mean and a positive std for each name")
        return replace(targets, means=tuple(map(float, means)), stds=tuple(map(float, stds)))

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "means": list(self.means), "stds": list(self.stds)}

    def fitted(self, values: np.ndarray) -> Self:
        stds = values.std(0)
        largest = np.abs(values).max(0)
        # a constant number is not scaled
        stds = np.where(stds > _CONSTANT * largest, stds, 1.0)
        means = values.mean(0)
        return replace(self, means=tuple(means.tolist()), stds=tuple(stds.tolist()))

    def finish(self, network: nn.Module) -> nn.Module:
        means, stds = self._scale
        return in_units(network, means, stds)

    @property
    def _scale(self) -> tuple[Sequence[float], Sequence[float]]:
        """Means and stds."""
        count = len(self.names)
        means = self.means or (0.0,) * count
        stds = self.stds or (1.0,) * count
        return means, stds

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        named_ranges = zip(self.names, np.ptp(values, 0), strict=True)
        constant = [name for name, extent in named_ranges if not extent]
        warnings = [f"all {split} cases have the same {', '.join(constant)}"] if constant else []
        for name, column in zip(self.names, values.T, strict=True):
            for value in _stand_ins(column):
                others = column[column != value]
                cases = len(column) - len(others)
                warnings.append(
                    f"{cases} {split} cases have {name} {value:g}, all others are from {others.min():.4g} to "
                    f"{others.max():.4g}: if it stands for a missing value, leave these rows out"
                )
        return "; ".join(warnings) or None

    def members(self, values: np.ndarray) -> None:
        return None

    def decode(self, logits: Tensor) -> Tensor:
        return logits.float()

    def encode(self, label: Tensor) -> Tensor:
        means, stds = _on_device(self, label.device)
        return (label.float() - means) / stds

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        # networks return units: outputs are standardised as labels are
        return loss(self.encode(outputs), encoded)

    def in_units(self, standardised: Tensor) -> Tensor:
        means, stds = _on_device(self, standardised.device)
        return standardised * stds + means

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        rows = []
        for output, true in zip(outputs.T, truth.T, strict=True):
            rows.append(image_level.regression_metrics(output, true, counts))
        return image_level.mean_of(rows)

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        metrics = {}
        for index, name in enumerate(self.names):
            column = slice(index, index + 1)
            targets = RegressionTargets((name,))
            metrics[name] = image_level.measure(targets, outputs[:, column], truth[:, column])
        return metrics

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The mean absolute error in standard deviations: of the training cases, else of the truth."""
        stds = np.array(self.stds) if self.stds else truth.std(0)
        stds = np.where(stds > 0, stds, 1)
        scaled = np.abs(outputs - truth) / stds
        errors: np.ndarray = scaled.mean(1)
        return errors

    def shown_output(self, outputs: np.ndarray) -> int:
        return 0

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        return {"scatter": plots.scatter(self.names, outputs, truth)}

    def label_text(self, values: Sequence[float]) -> str:
        named_values = zip(self.names, values, strict=True)
        return ", ".join(f"{name} {value:.4g}" for name, value in named_values)

    def prediction_text(self, outputs: Sequence[float]) -> str:
        return self.label_text(outputs)


def _stand_ins(column: np.ndarray) -> list[float]:
    """Values that probably mean that a number is missing: -1 where no other is negative, or nines such as
    -999 and 9999 beyond all others.
    """
    found = []
    for value in {float(column.min()), float(column.max())}:
        others = column[column != value]
        if not len(others):
            continue
        gap = max(others.min() - value, value - others.max())
        is_nines = set(f"{abs(value):g}") == {"9"} and abs(value) > 9
        is_lone_minus = value in (-1, -9) and others.min() >= 0
        if is_lone_minus or (is_nines and gap > np.ptp(others)):
            found.append(value)
    return sorted(found)


def _is_finite(value: Any) -> bool:
    # `type`, as True and False are of class int
    return type(value) in (int, float) and abs(value) < math.inf


@lru_cache(maxsize=16)
def _on_device(targets: RegressionTargets, device: torch.device) -> tuple[Tensor, Tensor]:
    """Means and stds, so that no step copies them."""
    means, stds = targets._scale
    with torch.inference_mode(False):  # training uses them, too
        return torch.tensor(means, device=device), torch.tensor(stds, device=device)


def _list_of(content: Any) -> list[Any]:
    """A list from an untrusted file. Raises: ValueError: not a list."""
    if not isinstance(content, (list, tuple)):
        raise ValueError("expected a list")
    return list(content)
