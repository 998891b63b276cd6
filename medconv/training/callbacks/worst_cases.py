"""What TensorBoard shows of whole images: the truth in words, the scores as a card, and the cases that are
most wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from medconv.inference import saliency
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets

log = logging.getLogger(__name__)
_MANY = 20  # names in a card


def said(image_targets: ImageLevelTargets, values: Sequence[float]) -> str:
    """What a case has, in words. Args: values: as `Case.values`."""
    if image_targets.kind == "multiclass":
        return image_targets.names[int(values[0])]
    if image_targets.kind == "multilabel":
        return (
            ", ".join(name for name, value in zip(image_targets.names, values, strict=True) if value)
            or "nothing"
        )
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(image_targets.names, values, strict=True))


def predicted(image_targets: ImageLevelTargets, outputs: Sequence[float]) -> str:
    """What a network says, in words: the most probable class, each finding from 0.5 on, or the numbers."""
    if image_targets.kind == "regression":
        return said(image_targets, outputs)
    found = image_level.decided(image_targets, np.array([outputs]))[0]
    there = [
        f"{name} {value:.2f}"
        for name, value, is_found in zip(image_targets.names, outputs, found, strict=True)
        if is_found
    ]
    return ", ".join(there) or "nothing"


def card(image_targets: ImageLevelTargets, outputs: np.ndarray, truth: np.ndarray) -> str:
    """A Markdown table of the scores, and of how many cases have what."""
    scores = image_level.measure(image_targets, outputs, truth)
    lines = [f"{len(truth)} cases, {image_targets.kind}", "", "| score | |", "|---|---|"]
    lines += [f"| {name} | {'-' if value is None else f'{value:.4f}'} |" for name, value in scores.items()]
    if image_targets.kind != "regression":
        lines += ["", "| name | cases |", "|---|---|"]
        counts = image_level.positives(image_targets, truth).sum(0)
        rows = list(zip(image_targets.names, counts, strict=True))
        lines += [f"| {name} | {count} |" for name, count in rows[:_MANY]]
    return "\n".join(lines)


class WorstCases:
    """The validation cases that are most wrong, with their images, of those that this process has seen.

    Args: cases: how many to keep.
    """

    def __init__(self, cases: int) -> None:
        self.cases = cases
        self.kept: list[
            tuple[float, str, Tensor, list[float], list[float]]
        ] = []  # error, case, image, outputs, values

    def see(self, image_targets: ImageLevelTargets, batch: dict[str, Any], outputs: Tensor) -> None:
        """Shape: as of a validation batch, with outputs (batch, image_targets.num_outputs)."""
        found, values = outputs.float().cpu().numpy(), batch["label"].float().cpu().numpy()
        errors = _errors(image_targets, found, values)
        for place in np.argsort(-errors, kind="stable")[: self.cases]:
            if len(self.kept) < self.cases or errors[place] > self.kept[-1][0]:
                image = batch["image"][place].detach().float().cpu().clone()
                row = (
                    float(errors[place]),
                    batch["case"][place],
                    image,
                    found[place].tolist(),
                    values[place].tolist(),
                )
                self.kept = sorted([*self.kept, row], key=lambda row: -row[0])[: self.cases]

    def pictures(self, module: Any, spacing_mm: Sequence[float]) -> Iterator[tuple[str, np.ndarray]]:
        """Tag and picture of each: the image, and where what the network said comes from."""
        for _, case, image, outputs, values in self.kept:
            words = (
                f"{said(module.image_targets, values)}, predicted {predicted(module.image_targets, outputs)}"
            )
            try:
                picture = saliency.overlay(module.network, image.to(module.device), spacing_mm)
            except (
                AssertionError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # a picture is no reason to lose a run
                said_of_it = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("no picture of the cases that are most wrong: %s", said_of_it)
                return
            yield f"worst/{case} ({words})", picture


def _errors(image_targets: ImageLevelTargets, outputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Comparable between batches, which the spread of a batch's truth is not."""
    if image_targets.kind == "regression":
        return np.abs(outputs - values).mean(1)
    return image_level.errors(image_targets, outputs, values)
