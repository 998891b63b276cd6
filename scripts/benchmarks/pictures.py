"""Pictures of the size of a fundus camera's: branching vessels on a textured ground, and their masks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

COUNT = 20
HEIGHT, WIDTH = 584, 565
# of the ground, how much its texture varies, and how much darker vessels are; red, green, blue
_COLOURS = ((170, 18, 20), (90, 14, 45), (50, 8, 12))


def made(folder: Path) -> tuple[Path, Path]:
    """The folders of pictures and masks, 0 and 255, as PNG; what is there already is kept."""
    images, masks = folder / "images", folder / "masks"
    for path in (images, masks):
        path.mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        if not (mask_file := masks / f"picture{number:02}.png").is_file():
            picture, mask = drawn(number)
            Image.fromarray(picture).save(images / mask_file.name)
            Image.fromarray(mask).save(mask_file)
    return images, masks


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture (HEIGHT, WIDTH, 3) and its mask (HEIGHT, WIDTH), uint8."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((HEIGHT, WIDTH), bool)
    y, x = HEIGHT / 2 + rng.normal(0, 20), WIDTH * rng.choice([0.25, 0.75])
    for angle in np.linspace(0, 2 * np.pi, 8, endpoint=False):
        _grow(mask, rng, y, x, angle + rng.normal(0, 0.2), rng.uniform(4, 8), 300)
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    lens = np.hypot(rows - HEIGHT / 2, columns - WIDTH / 2) < 0.48 * WIDTH
    mask &= lens
    texture = 25 * gaussian_filter(rng.normal(size=mask.shape), 25)
    texture += 2 * gaussian_filter(rng.normal(size=mask.shape), 4)
    contrast = gaussian_filter(rng.random(mask.shape), 40)
    contrast = 0.3 + 0.7 * (contrast - contrast.min()) / np.ptp(contrast)
    vessels = contrast * gaussian_filter(mask.astype(float), 1.0)
    channels = [
        (ground + varies * texture - darker * vessels + rng.normal(0, 7, mask.shape)) * lens
        for ground, varies, darker in _COLOURS
    ]
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8), np.where(mask, 255, 0).astype(np.uint8)


def _grow(
    mask: np.ndarray, rng: np.random.Generator, y: float, x: float, angle: float, width: float, length: float
) -> None:
    """Draw a vessel that winds, thins and branches. Args: width, length: pixels."""
    for _ in range(int(length)):
        angle += rng.normal(0, 0.06)
        y, x, half = y + math.sin(angle), x + math.cos(angle), max(1, round(width / 2))
        if not (half < y < HEIGHT - half and half < x < WIDTH - half):
            return
        mask[int(y) - half : int(y) + half, int(x) - half : int(x) + half] = True
        width *= 0.9985
        if width > 1.2 and rng.random() < 0.012:
            turn = rng.choice([-1, 1]) * rng.uniform(0.4, 0.9)
            _grow(mask, rng, y, x, angle + turn, 0.75 * width, 0.6 * length)
