"""Radiographs to classify, larger than a CPU can train on: half of them have a faint nodule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import zoom

COUNT = 200
EDGE = 1024
CLASSES = ("healthy", "nodule")
RADIUS = (30, 60)  # pixels, range
_CONTRAST = 40  # grey values
# Smooth textures: values along an edge, and how much they vary
_TEXTURES = ((12, 25), (64, 6))
_NOISE = 8


def made(folder: Path, count: int = COUNT) -> Path:
    """A folder CLASS/NUMBER.png for each class; what is there already is kept."""
    for number in range(count):
        path = folder / CLASSES[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            Image.fromarray(drawn(number)).save(path)
    return folder


def drawn(seed: int) -> np.ndarray:
    """A picture (EDGE, EDGE), uint8; those of odd seeds have a nodule."""
    rng = np.random.default_rng(seed)
    picture = rng.normal(120, 10) + rng.normal(0, _NOISE, (EDGE, EDGE))
    for values, varies in _TEXTURES:
        picture += varies * zoom(rng.normal(size=(values, values)), EDGE / values, order=1)
    if seed % 2:
        radius = rng.integers(*RADIUS)
        y, x = rng.integers(2 * radius, EDGE - 2 * radius, 2)
        rows, columns = np.ogrid[:EDGE, :EDGE]
        picture += _CONTRAST * (np.hypot(rows - y, columns - x) < radius)
    return picture.clip(0, 255).astype(np.uint8)
