"""Random label maps of three classes, with the grid and the tolerances that their metrics need."""

import numpy as np
from scipy.ndimage import gaussian_filter

from medconv.data.case import Grid
from medconv.targets.label_map import LabelMapTargets

SPACING = (1.0, 1.5, 2.0)
TARGETS = LabelMapTargets.of_classes(("background", "one", "two", "three"))
MM = {"one": 1.0, "two": 2.0, "three": 1.0}


def grid(label: np.ndarray, *spacing_mm: float) -> Grid:
    return Grid.of(label.shape, np.diag([*(spacing_mm or SPACING), 1]))


def labels(seed: int, shape: tuple[int, ...] = (12, 10, 8)) -> np.ndarray:
    """Three classes and background, in pieces."""
    rng = np.random.default_rng(seed)
    return (
        np.stack([gaussian_filter(rng.normal(size=shape), 1.2) for _ in range(4)]).argmax(0).astype(np.int16)
    )
