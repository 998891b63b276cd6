"""Preparing one large volume, step by step, beside what no preparation can do without: decompression and one
resampling of the image. CPU seconds of one thread; the disk does not count.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import ct_phantom, results
from medconv.data.case_files import image_of, label_of
from medconv.data.datasets.dataset_json import msd
from medconv.data.preprocessing.examine import examine
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_case
from medconv.data.preprocessing.resampling import zoom
from medconv.data.preprocessing.store import Store

REFERENCE = "gunzip both, resample the image"
_MM = 1.5  # the network's grid
_WINDOW = {"percentile_00_5": -900.0, "percentile_99_5": 900.0, "mean": 0.0, "std": 300.0}
_PIECE = 2**22  # bytes
_SHOWN = ["case", "variant", "seconds", "spread", "ratio", "ms_per_million_voxels"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=int, nargs=3, default=ct_phantom.SHAPE, help="of the generated CT")
    parser.add_argument("--root", type=Path, help="first case of a dataset of the Decathlon instead")
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> list[results.Row]:
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1):
        root = options.root or ct_phantom.made(Path(folder), options.shape, count=1)
        steps, voxels = _steps(root, Path(folder) / "store")
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                seconds[name].append(_cpu_seconds(step))
    totals = np.add(seconds["gunzip image and label map"], seconds["resample the image"])
    seconds = {REFERENCE: totals.tolist(), **seconds}
    case = f"{root.name}, to {_MM} mm"
    kind = {"benchmark": "preparing", "case": case, "reference": REFERENCE, **results.conditions()}
    return [{**kind, "variant": name, **_row(times, totals, voxels)} for name, times in seconds.items()]


def show(rows: Sequence[results.Row]) -> str:
    return results.table(rows, _SHOWN)


def _steps(root: Path, store_folder: Path) -> tuple[dict[str, Callable[[], object]], int]:
    """What is timed, by name, and the voxels of the case."""
    dataset = msd(root)
    case = dataset.cases[0]
    config = PreprocessingConfig(3, (_MM,) * 3, ("ct",), (_WINDOW,))
    num_classes = len(dataset.class_names)
    image, _ = image_of(case)
    entry = preprocess_case(case, config, num_classes)
    steps: dict[str, Callable[[], object]] = {
        "gunzip image and label map": partial(_gunzip, case.files),
        "resample the image": partial(zoom, image[0], entry.image.shape[1:]),
        "read image and label map": lambda: (image_of(case), label_of(case)),
        "prepare in all": lambda: Store(store_folder).write(case, preprocess_case(case, config, num_classes)),
        "check": partial(examine, case, dataset),
    }
    return steps, image[0].size


def _row(times: Sequence[float], totals: np.ndarray, voxels: int) -> results.Row:
    ratios = np.divide(times, totals)
    first_quartile, last_quartile = np.percentile(ratios, [25, 75])
    return {
        "seconds": median(times),
        "ratio": float(np.median(ratios)),
        "spread": float(last_quartile - first_quartile),
        "ms_per_million_voxels": 1e9 * median(times) / voxels,
    }


def _cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _gunzip(paths: Sequence[Path]) -> None:
    for path in paths:
        with gzip.open(path) as file:
            while file.read(_PIECE):
                pass
