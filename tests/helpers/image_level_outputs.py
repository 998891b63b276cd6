"""Image-level targets of each kind, and outputs for them."""

from __future__ import annotations

import numpy as np
import torch
from reference import scores

from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.image_level.targets import ImageLevelTargets

TWO = MulticlassTargets(("normal", "pneumonia"))
FOUR = MulticlassTargets(("a", "b", "c", "d"))
FINDINGS = MultilabelTargets(("effusion", "nodule", "mass"))
NUMBERS = RegressionTargets(("age", "weight"))


def drawn(targets: ImageLevelTargets, cases: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Outputs that are better than chance and have ties, and the truth."""
    rng = np.random.default_rng(seed)
    if targets == NUMBERS:
        truth = rng.normal(50, 20, (cases, targets.num_values))
        return truth + rng.normal(3, 10, truth.shape), truth
    if targets == FINDINGS:
        truth = (rng.random((cases, targets.num_values)) < [0.5, 0.2, 0.1]).astype(float)
    else:
        truth = rng.integers(targets.num_outputs, size=(cases, 1)).astype(float)
    noise = rng.normal(0, 1, (cases, targets.num_outputs))
    logits = targets.members(truth) + noise
    return targets.decode(torch.tensor(logits.round(1))).numpy(), truth


def slow_metrics(
    targets: ImageLevelTargets, outputs: np.ndarray, truth: np.ndarray
) -> dict[str, float | None]:
    """The metrics by the plain definitions of `tests/reference/scores.py`."""
    values = outputs.astype(float).tolist()
    if targets.kind == "multiclass":
        return scores.classes(values, truth[:, 0].astype(int).tolist())
    if targets.kind == "multilabel":
        return scores.findings(values, truth.tolist())
    return scores.numbers(values, truth.tolist())
