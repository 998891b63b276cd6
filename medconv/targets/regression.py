"""Regression targets: one or several numbers per image, in any unit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from medconv.metrics import image_level, plots
from medconv.metrics.image_level import Columns
from medconv.metrics.segmentation import MetricValues
from medconv.models.output_scaling import in_units
from medconv.targets.base import list_of
from medconv.targets.monitor import MAE, MonitoredMetric
from medconv.targets.numbers import NumberTargets

_CONSTANT = 1e-12  # a spread below this share of the largest value is rounding error


@dataclass(frozen=True)
class RegressionTargets(NumberTargets):
    """Numbers, in the units of the labels.

    For the loss they are standardised, so that it does not depend on units; networks return units.
    Args: means, stds: of each number over the training cases; empty: 0 and 1.
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
        means, stds = (list_of(content.get(key) or ()) for key in ("means", "stds"))
        finite = all(type(value) in (int, float) and abs(value) < math.inf for value in (*means, *stds))
        counts = {len(means), len(stds)}
        if not finite or counts not in ({0}, {len(targets.names)}) or not all(std > 0 for std in stds):
            raise ValueError("regression targets need a mean and a positive std for each name")
        return replace(targets, means=tuple(map(float, means)), stds=tuple(map(float, stds)))

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "means": list(self.means), "stds": list(self.stds)}

    def fitted(self, values: np.ndarray) -> Self:
        stds, largest = values.std(0), np.abs(values).max(0)
        stds = np.where(stds > _CONSTANT * largest, stds, 1.0)
        return replace(self, means=tuple(values.mean(0).tolist()), stds=tuple(stds.tolist()))

    def finish(self, network: nn.Module) -> nn.Module:
        return in_units(network, *self._scale)

    @property
    def _scale(self) -> tuple[Sequence[float], Sequence[float]]:
        count = len(self.names)
        return self.means or (0.0,) * count, self.stds or (1.0,) * count

    def check_examples(self, values: np.ndarray, split: str) -> str | None:
        same = [name for name, spread in zip(self.names, np.ptp(values, 0), strict=True) if not spread]
        return f"all {split} cases have the same {', '.join(same)}" if same else None

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
        return loss(self.encode(outputs), encoded)

    def _trial_outputs(self, noise: Tensor) -> Tensor:
        means, stds = _on_device(self, noise.device)
        return noise * stds + means

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
        pairs = zip(outputs.T, truth.T, strict=True)
        return image_level.mean_of([image_level.regression_metrics(o, t, counts) for o, t in pairs])

    def per_name(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, MetricValues]:
        pairs = zip(self.names, outputs.T[..., None], truth.T[..., None], strict=True)
        return {name: image_level.measure(RegressionTargets((name,)), o, t) for name, o, t in pairs}

    def errors(self, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """The mean absolute error in standard deviations: of the training cases, else of the truth."""
        spread = np.array(self.stds) if self.stds else truth.std(0)
        errors: np.ndarray = (np.abs(outputs - truth) / np.where(spread > 0, spread, 1)).mean(1)
        return errors

    def shown_output(self, outputs: np.ndarray) -> int:
        return 0

    def pictures(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, np.ndarray]:
        return {"scatter": plots.scatter(self.names, outputs, truth)}

    def label_text(self, values: Sequence[float]) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in zip(self.names, values, strict=True))

    def prediction_text(self, outputs: Sequence[float]) -> str:
        return self.label_text(outputs)


@lru_cache(maxsize=16)
def _on_device(targets: RegressionTargets, device: torch.device) -> tuple[Tensor, Tensor]:
    """Means and stds, so that no step copies them."""
    means, stds = targets._scale
    with torch.inference_mode(False):  # training uses them, too
        return torch.tensor(means, device=device), torch.tensor(stds, device=device)
