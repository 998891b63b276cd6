"""Prepare a dataset once: check every file, take the fingerprint, fill the store.

Several processes may call this at once (ranks, nodes on a shared filesystem): one works, the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from medconv.data.case import Case, Dataset
from medconv.data.check import Fingerprint, check
from medconv.data.files import read_image, read_label
from medconv.data.preprocess import Recipe, preprocess, preprocess_label
from medconv.data.store import Entry, Store, signature

_VERSION = 1  # part of every recipe's hash: raise it when preprocessing changes what it writes
_LOCATIONS = 5_000  # foreground voxels kept per class and case

log = logging.getLogger(__name__)


def dataset_folder(cache: Path, dataset: Dataset) -> Path:
    """Where a dataset's fingerprint and stores live: its name and a hash of its files' paths."""
    files = [str(path.resolve()) for case in dataset.cases for path in case.files]
    return cache / f"{_safe(dataset.name)}-{_hash(files)}"


def fingerprint(dataset: Dataset, folder: Path, workers: int) -> Fingerprint:
    """Check all files and measure the dataset, or read what an earlier run found if no file changed since.

    Raises: ValueError: faults in the dataset, one line each.
    """
    path = folder / "fingerprint.json"
    with _lock(folder):
        sources = _sources(dataset)
        if (known := _kept(path, sources)) is not None:
            return known
        found, warnings = check(dataset, workers)
        for warning in warnings:
            log.warning(warning)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"sources": sources, "fingerprint": asdict(found)}))
        partial.replace(path)
        return found


def prepare(dataset: Dataset, recipe: Recipe, folder: Path, workers: int) -> Store:
    """Fill the store of this recipe; cases that are there and unchanged are left alone.

    At most `workers` volumes are in memory at once.
    """
    store = Store(folder / _hash([_VERSION, asdict(recipe), dataset.class_names]))
    with _lock(folder):
        missing = [case for case in dataset.cases if not store.has(case)]
        if missing:
            store.sweep()
            log.info("preparing %d of %d cases into %s", len(missing), len(dataset.cases), store.folder)
            _fill(store, missing, recipe, len(dataset.class_names), workers)
    return store


def prepare_case(case: Case, recipe: Recipe, num_classes: int) -> Entry:
    """One case from its files to what the store holds."""
    assert case.label is not None
    image, placement = preprocess(*read_image(case.images), recipe)
    label = preprocess_label(read_label(case.label)[0], placement, recipe, num_classes)
    return Entry(image, label, _foreground(label, num_classes), placement)


def _fill(store: Store, cases: Sequence[Case], recipe: Recipe, num_classes: int, workers: int) -> None:
    def one(case: Case) -> None:
        store.write(case, prepare_case(case, recipe, num_classes))

    with ThreadPoolExecutor(workers) as pool:
        list(tqdm(pool.map(one, cases), total=len(cases), desc="preparing", unit="case", leave=False, disable=None))


def _foreground(label: np.ndarray, num_classes: int) -> np.ndarray:
    """(voxels, 1 + axes) int32: class, then position; spread evenly over each class."""
    rows = [np.empty((0, 1 + label.ndim), np.int32)]
    for value in range(1, num_classes):
        where = np.argwhere(label == value)
        chosen = where[:: max(1, len(where) // _LOCATIONS)][:_LOCATIONS]
        rows.append(np.column_stack([np.full(len(chosen), value), chosen]).astype(np.int32))
    return np.concatenate(rows)


def _sources(dataset: Dataset) -> list[Any]:
    """As JSON gives it back; a file that is missing has no signature, and `check` says so."""
    files = [signature(case) if all(p.is_file() for p in case.files) else None for case in dataset.cases]
    return json.loads(json.dumps([_VERSION, dataset.class_names, dataset.modalities, files]))


def _kept(path: Path, sources: list[Any]) -> Fingerprint | None:
    """The fingerprint in a file, if it is of these sources."""
    try:
        content = json.loads(path.read_text())
        return _from_json(content["fingerprint"]) if content["sources"] == sources else None
    except (FileNotFoundError, ValueError, KeyError):  # absent, or cut by a power failure
        return None


def _from_json(known: dict[str, Any]) -> Fingerprint:
    return Fingerprint(
        known["spatial_dims"],
        tuple(tuple(s) for s in known["shapes"]),
        tuple(tuple(s) for s in known["spacings_mm"]),
        tuple(known["intensities"]),
        tuple(tuple(c) for c in known["class_voxels"]),
    )


@contextmanager
def _lock(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
