"""`data=image_pairs`: images and the images to predict from them, by patterns or in two folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Dataset
from medconv.data.datasets.folder import pairs_of
from medconv.data.io.images import read_image
from medconv.features.continuous.targets import ContinuousTargets

_NUM_READ = 8  # targets, of which mean and standard deviation are taken


def image_pairs(
    images: str | Mapping[str, str],
    labels: str,
    same_units: bool = False,
    modality: str = "MRI",
    root: str | None = None,
) -> Dataset:
    """Pairs of images and targets of one grid.

    Args:
        images: a pattern or folder, or one for each channel by its name, such as {t1: ..., t2: ...}.
        labels: the images to predict, a pattern or folder.
        same_units: as of `ContinuousTargets`.
        modality: of all channels without names.
        root: folder in which relative patterns begin; None: the current one.
    Raises:
        ValueError: no such folder, or no pairs. A missing channel or label becomes an error of its case.
    """
    pairs = pairs_of(images, labels, modality, root)
    statistics: dict[str, Any] = {} if same_units else _statistics(list(pairs.labels.values()))
    targets = ContinuousTargets(same_units=same_units, **statistics)
    return pairs.dataset(targets, "images")


def _statistics(files: list[Path]) -> dict[str, float]:
    """`mean`, `std` and `low` of some targets, evenly spaced among all; empty if none can be read.

    What cannot be read, or is not finite, is an error of its case later.
    """
    rows = []
    for index in np.unique(np.linspace(0, len(files) - 1, _NUM_READ).round().astype(int)):
        try:
            values = read_image([files[index]])[0]
        except ValueError:
            continue
        values = values[np.isfinite(values)].astype(np.float64)
        if values.size:
            rows.append((values.mean(), np.square(values).mean(), values.min()))
    if not rows:
        return {}
    means, squares, lows = np.array(rows).T
    std = float(np.sqrt(max(squares.mean() - means.mean() ** 2, 0.0)))
    # six digits: the same on every machine
    mean, low, std = (float(f"{value:.6g}") for value in (means.mean(), lows.min(), std))
    return {"mean": mean, "std": std or 1.0, "low": low}
