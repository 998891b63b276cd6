"""A table of labelled pictures, as `data=csv` reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers import tiny

from medconv import config
from medconv.config import RunConfig
from medconv.data.io.raster import write_picture

COUNT, SIZE = 10, (12, 8)  # X, Y


def pixels(seed: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, (size[1], size[0]), dtype=np.uint8)


def write(root: Path, count: int = COUNT, **sizes: tuple[int, int]) -> Path:
    """Pictures 0.png, 1.png, ...; every fifth is of class b.

    Args: sizes: `_3=(9, 9)` gives picture 3 another size.
    """
    root.mkdir(parents=True, exist_ok=True)
    lines = ["path,label,age"]
    for i in range(count):
        write_picture(root / f"{i}.png", pixels(i, sizes.get(f"_{i}", SIZE)))
        lines.append(f"{i}.png,{'b' if i % 5 == 0 else 'a'},{20 + i}")
    (root / "labels.csv").write_text("\n".join(lines))
    return root / "labels.csv"


def checked(table: Path, *overrides: str) -> RunConfig:
    """The config of a run on such a table."""
    arguments = [
        "data=csv",
        f"data.root={table}",
        f"data.cache_dir={table.parent.parent / 'cache'}",
        "data.num_workers=0",
    ]
    words = (*arguments, "trainer.accelerator=cpu", "data.num_folds=2", *overrides)
    return config.validate(tiny.composed(*words))
