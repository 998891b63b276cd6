"""All metrics of a case as `evaluate` measures them, beside MONAI's functions for the same numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai import metrics as monai
from scipy.ndimage import gaussian_filter

from benchmarks import results
from medconv.data.case import Grid
from medconv.data.io.images import in_folder, read_label
from medconv.features.diagnosis.alternating import alternate
from medconv.metrics.segmentation import measure
from medconv.targets.label_map import LabelMapTargets

Pair = tuple[np.ndarray, np.ndarray, tuple[float, ...]]  # prediction, reference, spacing
REFERENCE = "MONAI"
_SHOWN = ["case", "variant", "seconds", "ratio", "spread", "furthest_apart"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labels", type=Path, help="folder of label maps, to measure on them, each against itself moved"
    )
    parser.add_argument("--pairs", type=int, default=3, help="timings of each variant, alternating")
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(320, 320, 200), help="of the large case that is made up"
    )


def run(options: argparse.Namespace) -> list[results.Row]:
    """Seconds for all cases of a set, without reading them; `furthest_apart` is the largest difference of
    a value.
    """
    sets = {f"{results.by(options.shape)}, 6 organs": [_organs(options.shape, 6)]}
    if options.labels:
        rows = [read_label(path) for path in in_folder(options.labels, "--labels").values()]
        sets[f"{options.labels.name}, {len(rows)} cases"] = [
            (_moved(a), a, grid.spacing_mm) for a, grid in rows
        ]
    return [row for name, pairs in sets.items() for row in _compared(name, pairs, options.pairs)]


def show(rows: Sequence[results.Row]) -> str:
    return results.table(rows, _SHOWN)


def _compared(name: str, pairs: Sequence[Pair], times: int) -> list[results.Row]:
    variants: dict[str, Callable[[], Any]] = {
        "medconv": lambda: [_ours(*pair) for pair in pairs],
        REFERENCE: lambda: [_monais(*pair) for pair in pairs],
    }
    scores = [np.concatenate([np.ravel(np.array(v, float)) for v in run()]) for run in variants.values()]
    differences = np.abs(np.subtract(*scores))
    apart = float(
        differences[np.isfinite(differences)].max(initial=0)
    )  # where a class is missing MONAI has nan or infinity
    kind = {
        "benchmark": "evaluation",
        "case": name,
        "reference": REFERENCE,
        "furthest_apart": apart,
        **results.conditions(),
    }
    timed = alternate(variants, REFERENCE, times, warm_up=0)
    return [{**kind, "variant": variant, **row} for variant, row in timed.items()]


def _ours(
    prediction: np.ndarray, reference: np.ndarray, spacing: tuple[float, ...]
) -> list[list[float | None]]:
    names = tuple(str(v) for v in range(int(reference.max()) + 1))
    grid = Grid.of(reference.shape, np.diag([*spacing, 1.0]))
    distances = measure(
        prediction, reference, grid, LabelMapTargets.of_classes(names), dict.fromkeys(names, 1.0)
    )
    return [
        [distances[metric][name] for name in names[1:]] for metric in ("dice", "nsd", "hd95_mm", "asd_mm")
    ]


def _monais(prediction: np.ndarray, reference: np.ndarray, spacing: tuple[float, ...]) -> list[list[float]]:
    values: list[list[float]] = []
    for value in range(1, int(reference.max()) + 1):
        a, b = (torch.from_numpy(label == value)[None, None] for label in (prediction, reference))
        plain: Any = {"include_background": True}
        in_mm: Any = {**plain, "spacing": spacing}
        distances = (
            monai.compute_dice(a, b, **plain),
            monai.compute_surface_dice(a, b, [1.0], use_subvoxels=True, **in_mm),
            monai.compute_hausdorff_distance(a, b, percentile=95, **in_mm),
            monai.compute_average_surface_distance(a, b, symmetric=True, **in_mm),
        )
        values.append([float(number) for number in distances])
    return [list(column) for column in zip(*values, strict=True)]


def _moved(label: np.ndarray) -> np.ndarray:
    """A prediction of the same structures: smoothed, and moved by a voxel along the first axis."""
    smooth = [
        gaussian_filter((label == value).astype(np.float32), 1) for value in range(int(label.max()) + 1)
    ]
    return np.roll(np.argmax(smooth, 0), 1, 0).astype(np.int16)


def _organs(shape: Sequence[int], number: int) -> Pair:
    """Ellipsoids of different sizes, each from a tenth to a third of the image long."""
    rng = np.random.default_rng(0)
    grid = np.ogrid[tuple(slice(n) for n in shape)]
    label = np.zeros(shape, np.int16)
    for value in range(1, number + 1):
        middle = [n * rng.uniform(0.25, 0.75) for n in shape]
        radii = [n * rng.uniform(0.05, 0.17) for n in shape]
        label[sum(((g - m) / r) ** 2 for g, m, r in zip(grid, middle, radii, strict=True)) < 1] = value
    return _moved(label), label, (0.8, 0.8, 1.5)
