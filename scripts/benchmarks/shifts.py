"""Dice of the networks of `learning` on images turned, mirrored, blurred, with thick slices or another
contrast, without training again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy import ndimage

import medconv
from benchmarks import learning
from benchmarks.results import Row, table
from medconv.data.case import Case
from medconv.data.case_files import label_on
from medconv.data.io.images import read_image
from medconv.inference.predictor import Predictor
from medconv.metrics.dice import mean
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.progress import track

Pair = tuple[np.ndarray, np.ndarray]  # an image (channels, X, Y, Z) and its label map (X, Y, Z)


def _turned(degrees: float) -> Callable[[Pair], Pair]:
    """In the plane of the first two axes, about the middle; corners are filled by the nearest voxel."""

    def turn(pair: Pair) -> Pair:
        image, label = pair
        settings = {"angle": degrees, "reshape": False}
        turned = ndimage.rotate(image, axes=(1, 2), order=1, mode="nearest", **settings)
        return turned, ndimage.rotate(label, axes=(0, 1), order=0, mode="constant", **settings)

    return turn


def _mirrored(pair: Pair) -> Pair:
    image, label = pair
    return image[:, ::-1], label[::-1]


def _thick(slices: int) -> Callable[[Pair], Pair]:
    """The mean of so many slices along the last axis, in each of them; the grid and the labels stay."""

    def thicken(pair: Pair) -> Pair:
        image, label = pair
        size = image.shape[-1]
        starts = np.arange(0, size, slices)
        counts = np.diff([*starts, size])
        means = np.add.reduceat(image, starts, axis=-1) / counts
        return np.repeat(means, counts, axis=-1), label

    return thicken


def _blurred(pair: Pair) -> Pair:
    image, label = pair
    return ndimage.gaussian_filter(image, (0, 1, 1, min(1, image.shape[-1] - 1))), label


def _contrast(gamma: float) -> Callable[[Pair], Pair]:
    """As of another scanner: intensities between the image's percentiles 1 and 99 raised to a power."""

    def change(pair: Pair) -> Pair:
        image, label = pair
        low, high = np.percentile(image, (1, 99))
        span = max(float(high - low), 1e-6)
        return low + span * np.clip((image - low) / span, 0, 1) ** gamma, label

    return change


SHIFTS: dict[str, Callable[[Pair], Pair]] = {
    "none": lambda pair: pair,
    "turned by 15 degrees": _turned(15),
    "turned by 45 degrees": _turned(45),
    "turned by 90 degrees": _turned(90),
    "mirrored": _mirrored,
    "slices 2 times as thick": _thick(2),
    "slices 4 times as thick": _thick(4),
    "blurred by 1 voxel": _blurred,
    "contrast, gamma 0.6": _contrast(0.6),
    "contrast, gamma 1.6": _contrast(1.6),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, required=True, help="the dataset of the trainings")
    learning.add_layout(parser)
    parser.add_argument(
        "--runs", type=Path, required=True, help="folder of one length, such as runs/learning/NAME/40-300"
    )
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=list(SHIFTS), metavar="NAME")
    parser.add_argument("--cases", type=int, help="validation cases; default: all")


def run(options: argparse.Namespace) -> list[Row]:
    """Predict the validation cases of every finished training, and compare variants with `plain`."""
    cases = {case.id: case for case in learning.cases_of(options)}
    runs = [
        (variant, int(folder.name), folder)
        for variant in learning.VARIANTS
        for folder in sorted((options.runs / learning.slug(variant)).glob("*"))
        if learning.summary(folder).get("status") == "done"
    ]
    if not runs:
        raise ValueError(f"{options.runs}: no finished training; benchmark.py learning makes some")
    scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for variant, seed, folder in track(runs, "predicting"):
        predict = medconv.load(folder, trusted=["benchmarks"], progress=False)
        validated = sorted(learning.summary(folder)["val/cases"])[: options.cases]
        for shift in options.shifts:
            dice = {name: _dice(predict, cases[name], SHIFTS[shift]) for name in validated}
            scores.setdefault((variant, shift), {})[seed] = dice
    rows = []
    comparisons = max(1, len({variant for variant, _, _ in runs} - {learning.PLAIN}))
    for (variant, shift), by_seed in scores.items():
        plain = scores.get((learning.PLAIN, shift), {})
        low, high, difference = learning.paired(by_seed, plain, comparisons)
        rows.append(
            {
                "benchmark": "shifts",
                "data": options.root.name,
                "case": shift,
                "variant": variant,
                "reference": learning.PLAIN,
                "seeds": len(by_seed),
                "dice": float(np.mean([list(dice.values()) for dice in by_seed.values()])),
                "difference": difference,
                "low": low,
                "high": high,
            }
        )
    return rows


def show(rows: Sequence[Row]) -> str:
    return table(rows, ("case", "variant", "seeds", "dice", "difference", "low", "high"))


def _dice(predict: Predictor, case: Case, shift: Callable[[Pair], Pair]) -> float:
    """The mean over the classes, as in validation."""
    image, grid = read_image(case.images)
    moved, reference = shift((image, label_on(case, grid)))
    targets = predict.targets
    assert isinstance(targets, SegmentationTargets)
    answer = predict(np.ascontiguousarray(moved, np.float32), affine=np.array(grid.affine))
    # a class that neither has is undefined; an image without any counts as right
    score = mean(targets.dice(answer, reference).values())
    return 1.0 if score is None else score
