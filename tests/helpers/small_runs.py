"""Runs on whole images: pictures in folders and tables, written small; real loaders, a real trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from helpers import tiny
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=6",
    "trainer.enable_progress_bar=false",
    "trainer.log_every_n_steps=1",
    "callbacks=none",  # pictures take a quarter of such a run
    "data.batch_size=4",
    "data.samples_per_epoch=12",
    "data.num_workers=0",
    "data.num_folds=3",
]
OURS = ["model=encoder", "model.channels=[4,8]", "model.strides=[2]", "model.kernel_size=3"]


def write_classes(root: Path, cases: int = 10, names: tuple[str, ...] = ("bright", "dark")) -> Path:
    """ROOT/CLASS/N.png, 16 x 16 grey: bright ones are."""
    for index, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(cases):
            pixels = np.random.default_rng([index, number]).normal(60 + 100 * (index == 0), 20, (16, 16))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / name / f"{name}{number}.png")
    return root


def write_table(root: Path, columns: dict[str, str], cases: int = 18) -> Path:
    """ROOT/labels.csv and its pictures. Args: columns: name to `number`, the brightness as 100 times
    itself, or `finding`.
    """
    root.mkdir(parents=True)
    with (root / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", *columns])
        for number in range(cases):
            bright = number % 4 / 4
            pixels = np.random.default_rng(number).normal(60 + 100 * bright, 15, (16, 16))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"{number}.png")
            values = {"number": 1000 + 100 * bright, "finding": int(bright > 0.4), "other": number // 2 % 2}
            writer.writerow([f"{number}.png", *(values[kind] for kind in columns.values())])
    return root / "labels.csv"


def overrides(root: Path, *more: str) -> list[str]:
    """Of a folder of classes, or of a table."""
    cache = f"data.cache_dir={root.parent / 'prepared'}"
    return [
        f"data={'csv' if root.suffix == '.csv' else 'imagefolder'}",
        f"data.root={root}",
        cache,
        *SMALL,
        *more,
    ]


def train(root: Path, folder: Path, *more: str) -> dict[str, Any]:
    """One run in this process; returns its summary."""
    return tiny.trained(*overrides(root, *more), f"run.dir={folder}")


def image_tags(run: Path) -> set[str]:
    """Tags of the images in TensorBoard."""
    tags: set[str] = set()
    for file in (run / "tensorboard").rglob("events*"):
        events = EventAccumulator(str(file), size_guidance={"images": 0})
        events.Reload()
        tags |= set(events.Tags()["images"])
    return tags
