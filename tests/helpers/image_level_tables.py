"""Tables of image-level predictions and labels, as several test files evaluate them."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from medconv.features.image_level.multiclass import MulticlassTargets

NASTY = '<img src=x onerror="alert(1)">'
CLASSES = MulticlassTargets(("cat", NASTY))


def write_table(path: Path, *lines: list[Any]) -> Path:
    """A CSV file of these lines."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def write_tables(root: Path, cases: int = 12) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """Predictions and labels, a third of them in the training set. Returns: both files, both as arrays."""
    rng = np.random.default_rng(0)
    second = rng.random(cases).round(3)
    outputs, truth = np.stack([1 - second, second], 1), (np.arange(cases) % 2).astype(float)
    predicted = [[f"c{i}", CLASSES.names[o.argmax()], *o] for i, o in enumerate(outputs)]
    labels = [
        [f"images/c{i}.png", CLASSES.names[int(t)], "train" if i < 4 else "testing"]
        for i, t in enumerate(truth)
    ]
    return (
        write_table(root / "predictions.csv", ["case", "predicted", *CLASSES.names], *predicted),
        write_table(root / "labels.csv", ["path", "label", "split"], *labels),
        outputs,
        truth[:, None],
    )
