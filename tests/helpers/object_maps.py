"""Pictures of bright discs, some of which touch, with object maps."""

from pathlib import Path

import numpy as np
from PIL import Image

SHAPE = (40, 44)


def discs() -> np.ndarray:
    """Four discs, of which the first two touch. Shape: (40, 44) uint16."""
    rows, columns = np.indices(SHAPE)
    objects = np.zeros(SHAPE, np.uint16)
    for value, (row, column) in enumerate([(10, 10), (10, 19), (28, 12), (25, 33)], start=1):
        objects[(rows - row) ** 2 + (columns - column) ** 2 <= 22] = value
    return objects


def write_discs(root: Path, cases: int = 6) -> Path:
    """Two folders, `images` and `objects`, of PNG files; the discs of case n are moved by n pixels."""
    (root / "images").mkdir(parents=True)
    (root / "objects").mkdir()
    for number in range(cases):
        objects = np.roll(discs(), number, axis=(0, 1))
        noise = np.random.default_rng(number).normal(0, 10, SHAPE)
        image = np.clip(60 + 120 * (objects > 0) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(image).save(root / f"images/case_{number}.png")
        Image.fromarray(objects).save(root / f"objects/case_{number}.png")
    return root
