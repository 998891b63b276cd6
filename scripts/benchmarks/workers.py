"""Memory of each loader worker, by the number of workers and the size of the dataset.

Linux only. A worker's memory is read from /proc while it waits with its batches ready: `rss`, with all it
shares with others; `pss`, in which a page counts by its share; `private`, what would be gone with it. The
bound is one worker, and for
each of N an interpreter: what one worker costs, alone, that reads nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.results import Row, conditions, table
from medconv import config
from medconv.data.case import Case, Grid
from medconv.data.loading.datamodule import DataModule, LoaderSettings
from medconv.data.loading.patch import Batch, PatchShape
from medconv.data.loading.samplers import ForegroundSampler, TrainingCases
from medconv.data.loading.samples import Patches
from medconv.data.preprocessing.preprocess import CropInfo, Entry
from medconv.data.preprocessing.store import Store
from medconv.data.splits import DataSplit

_ROWS = 5_000  # voxels per class that a store keeps to sample patches from
_PARTS = {"rss_MB": ("Rss",), "pss_MB": ("Pss",), "private_MB": ("Private_Clean", "Private_Dirty")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument(
        "--shape", nargs=3, type=int, default=[320, 320, 200], metavar=("X", "Y", "Z"), help="voxels"
    )
    parser.add_argument(
        "--patch", nargs=3, type=int, default=[96, 96, 96], metavar=("X", "Y", "Z"), help="voxels"
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--samples", type=int, default=400, help="that are read before memory is measured")
    parser.add_argument(
        "--names", type=int, default=0, help="of that many cases in the list, all of the same files"
    )
    parser.add_argument("--augment", default="light", help="an option of conf/augmentation, or nothing")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how workers are started")
    parser.add_argument("--scratch", type=Path, help="keeps the store; else a temporary folder does")


def run(options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        store, cases = generate(options.scratch or Path(temporary), options.cases, options.shape)
        names = options.names or len(cases)
        cases = [
            Case(c.id, tuple(map(Path, c.images)), Path(c.files[-1])) for c in islice(cycle(cases), names)
        ]
        rows = [_row(options, store, cases, workers) for workers in options.workers]
        idle = _data_module(options, store, cases, _as_it_is, workers=1)._loader(Nothing(), _only)
        (interpreter,) = measured(_started(idle, options.start), 10)
    return _bounded(rows, interpreter["pss_MB"])


def show(rows: Sequence[Row]) -> str:
    columns = ("case", "variant", *_PARTS, "peak_rss_MB", "interpreter_MB", "all_pss_MB", "bound_MB", "ratio")
    return table(rows, columns)


def generate(folder: Path, cases: int, shape: Sequence[int]) -> tuple[Store, list[Case]]:
    """A store of noise with two classes, made if it is missing."""
    store = Store(folder / f"workers-{cases}-{'x'.join(map(str, shape))}")
    source = folder / "source"
    folder.mkdir(parents=True, exist_ok=True)
    source.touch()
    generated = [Case(f"case{i:03d}", (source,), source) for i in range(cases)]
    for number, case in enumerate(generated):
        if not store.has(case):
            store.write(case, _entry(number, shape))
    return store, generated


def memory(pid: int) -> dict[str, float]:
    """`rss_MB`, `pss_MB` and `private_MB` of a process as it is now, and `peak_rss_MB` since it began."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def megabytes(name: str) -> float:
        return int(fields[name].split()[0]) * 1024 / 1e6

    return {
        **{key: sum(map(megabytes, names)) for key, names in _PARTS.items()},
        "peak_rss_MB": megabytes("VmHWM"),
    }


def measured(loader: Any, batches: int, settle_seconds: float = 1.0) -> list[dict[str, float]]:
    """Memory of each worker of a loader after so many batches, once they have prepared what they may
    prepare ahead.
    """
    iterator: Iterator[Any] = iter(loader)
    for _ in range(batches):
        next(iterator)
    time.sleep(settle_seconds)
    memories = [memory(worker.pid) for worker in loader._iterator._workers]
    del iterator
    loader._iterator._shutdown_workers()
    loader._iterator = None
    return memories


class Nothing(Dataset[Any]):
    """A dataset that reads nothing: the cost of the worker itself."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)

    def describe(self, index: int) -> tuple[str, str]:
        return "", ""


def _row(options: argparse.Namespace, store: Store, cases: Sequence[Case], workers: int) -> Row:
    data = _data_module(options, store, cases, _augment(options), workers)
    memories = measured(
        _started(data.train_dataloader(), options.start), -(-options.samples // options.batch)
    )
    size, patch = ("x".join(map(str, numbers)) for numbers in (options.shape, options.patch))
    case = (
        f"{len(cases)} cases of {size}, patch {patch}, batch {options.batch}, "
        f"augmentation={options.augment}, {options.start}"
    )
    return {
        "benchmark": "workers",
        "case": case,
        "variant": f"{workers} workers",
        "workers": workers,
        **{key: max(one[key] for one in memories) for key in (*_PARTS, "peak_rss_MB")},
        "all_pss_MB": sum(one["pss_MB"] for one in memories),
        **conditions(),
    }


def _data_module(
    options: argparse.Namespace, store: Store, cases: Sequence[Case], augment: Any, workers: int
) -> DataModule:
    patch = PatchShape(options.patch)
    training_cases = TrainingCases(cases, patch, class_indices=tuple, seed=0)
    samples = Patches(ForegroundSampler(training_cases, 0.33), augment, patch)
    loader = LoaderSettings(
        batch_size=options.batch,
        samples_per_epoch=100 * (options.samples + options.batch * workers),  # so that no epoch ends
        num_workers=workers,
    )
    return DataModule(store, DataSplit(list(cases), [], []), samples, loader)


def _bounded(rows: list[Row], interpreter: float) -> list[Row]:
    """Memory of N workers beside that of one and N interpreters, where one was measured."""
    one = next((row["all_pss_MB"] for row in rows if row["workers"] == 1), None)
    for row in rows if one is not None else ():
        bound = one + row["workers"] * interpreter
        row.update(interpreter_MB=interpreter, bound_MB=bound, ratio=row["all_pss_MB"] / bound)
        row["reference"] = "one worker and N interpreters"
    return rows


def _augment(options: argparse.Namespace) -> Callable[[Batch], Batch]:
    if options.augment == "nothing":
        return _as_it_is
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(
        OmegaConf.load(config.conf_dir() / "augmentation" / f"{options.augment}.yaml")
    )
    assert isinstance(node, dict)
    arguments = {"seed": 0, "spacing_mm": [1.0] * 3, "patch_size": options.patch}
    return config.build({str(k): v for k, v in node.items()}, "augmentation", **arguments)


def _only(items: list[Any]) -> Any:
    return items[0]


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _started(loader: Any, how: str) -> Any:
    loader.multiprocessing_context = how
    return loader


def _entry(seed: int, shape: Sequence[int]) -> Entry:
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((1, *shape), np.float32)
    label = (image[0] > 1).astype(np.uint8) + (image[0] > 2)
    rows = [np.argwhere(label == value) for value in (1, 2)]
    thinned = [places[:: max(1, len(places) // _ROWS)][:_ROWS] for places in rows]
    foreground = np.concatenate(
        [np.insert(places, 0, value, axis=1) for value, places in enumerate(thinned, 1)]
    )
    sizes = tuple(int(n) for n in shape)
    placement = CropInfo(Grid.of(sizes, np.eye(4)), sizes, tuple((0, n) for n in sizes))
    return Entry(image, label.astype(np.uint8), foreground.astype(np.int32), placement)
