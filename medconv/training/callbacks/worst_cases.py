"""What TensorBoard shows for image-level targets: labels as text, a table of scores, and the worst cases."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from medconv.inference import saliency
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets

log = logging.getLogger(__name__)
_MAX_NAMES = 20  # in a table of scores


def label_text(image_targets: ImageLevelTargets, values: Sequence[float]) -> str:
    """A case's label as text. Args: values: as in `Case.values`."""
    if image_targets.kind == "multiclass":
        return image_targets.names[int(values[0])]
    if image_targets.kind == "multilabel":
        return (
            ", ".join(name for name, value in zip(image_targets.names, values, strict=True) if value)
            or "nothing"
        )
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(image_targets.names, values, strict=True))


def prediction_text(image_targets: ImageLevelTargets, outputs: Sequence[float]) -> str:
    """A prediction as text: the most probable class, each label above 0.5, or the values."""
    if image_targets.kind == "regression":
        return label_text(image_targets, outputs)
    positive = image_level.decided(image_targets, np.array([outputs]))[0]
    rows = zip(image_targets.names, outputs, positive, strict=True)
    return ", ".join(f"{name} {value:.2f}" for name, value, is_positive in rows if is_positive) or "nothing"


def score_table(image_targets: ImageLevelTargets, outputs: np.ndarray, truth: np.ndarray) -> str:
    """Markdown tables of the scores, and of the number of cases of each class or label."""
    scores = image_level.measure(image_targets, outputs, truth)
    lines = [f"{len(truth)} cases, {image_targets.kind}", "", "| score | |", "|---|---|"]
    lines += [f"| {name} | {'-' if value is None else f'{value:.4f}'} |" for name, value in scores.items()]
    if image_targets.kind != "regression":
        lines += ["", "| name | cases |", "|---|---|"]
        counts = image_level.positives(image_targets, truth).sum(0)
        rows = list(zip(image_targets.names, counts, strict=True))
        lines += [f"| {name} | {count} |" for name, count in rows[:_MAX_NAMES]]
    return "\n".join(lines)


@dataclass(frozen=True)
class _WrongCase:
    error: float
    case: str
    image: Tensor
    outputs: list[float]
    values: list[float]


class WorstCases:
    """The validation cases with the largest errors, of those that this process has validated.

    Args: cases: how many to remember.
    """

    def __init__(self, cases: int) -> None:
        self.cases = cases
        self.worst: list[_WrongCase] = []  # largest error first

    def update(self, image_targets: ImageLevelTargets, batch: dict[str, Any], outputs: Tensor) -> None:
        """Args: batch: a validation batch. outputs: (batch, image_targets.num_outputs)."""
        predictions, values = outputs.float().cpu().numpy(), batch["label"].float().cpu().numpy()
        errors = _errors(image_targets, predictions, values)
        for i in np.argsort(-errors, kind="stable")[: self.cases]:
            if len(self.worst) < self.cases or errors[i] > self.worst[-1].error:
                image = batch["image"][i].detach().float().cpu().clone()
                labels = predictions[i].tolist(), values[i].tolist()
                wrong = _WrongCase(float(errors[i]), batch["case"][i], image, *labels)
                self.worst = sorted([*self.worst, wrong], key=lambda case: -case.error)[: self.cases]

    def pictures(self, module: Any, spacing_mm: Sequence[float]) -> Iterator[tuple[str, np.ndarray]]:
        """Tag and saliency map of each case."""
        for wrong in self.worst:
            label = label_text(module.image_targets, wrong.values)
            prediction = prediction_text(module.image_targets, wrong.outputs)
            try:
                picture = saliency.overlay(module.network, wrong.image.to(module.device), spacing_mm)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("no saliency maps of the worst cases: %s", reason)  # no reason to lose a run
                return
            yield f"worst/{wrong.case} ({label}, predicted {prediction})", picture


def _errors(image_targets: ImageLevelTargets, outputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One error per case, on the same scale in all batches."""
    if image_targets.kind == "regression":
        return np.abs(outputs - values).mean(1)
    return image_level.errors(image_targets, outputs, values)
