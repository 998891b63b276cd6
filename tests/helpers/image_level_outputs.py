"""Image-level targets of each kind, and outputs for them."""

from __future__ import annotations

import numpy as np
import torch

from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets

TWO = ImageLevelTargets("multiclass", ("normal", "pneumonia"))
FOUR = ImageLevelTargets("multiclass", ("a", "b", "c", "d"))
FINDINGS = ImageLevelTargets("multilabel", ("effusion", "nodule", "mass"))
NUMBERS = ImageLevelTargets("regression", ("age", "weight"))


def drawn(targets: ImageLevelTargets, cases: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Outputs that are better than chance and have ties, and the truth."""
    rng = np.random.default_rng(seed)
    if targets.kind == "regression":
        truth = rng.normal(50, 20, (cases, targets.num_values))
        return truth + rng.normal(3, 10, truth.shape), truth
    if targets.kind == "multilabel":
        truth = (rng.random((cases, targets.num_values)) < [0.5, 0.2, 0.1]).astype(float)
    else:
        truth = rng.integers(targets.num_outputs, size=(cases, 1)).astype(float)
    noise = rng.normal(0, 1, (cases, targets.num_outputs))
    logits = image_level.positives(targets, truth) + noise
    return targets.decode(torch.tensor(logits.round(1))).numpy(), truth
