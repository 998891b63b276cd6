"""Prepare a dataset once: check every file, take the fingerprint, fill the store.

Several processes may call this at once (ranks, nodes on a shared filesystem): one works, the others wait for
it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from medconv.data.case import Case, Dataset
from medconv.data.io.images import check_same_grid, read_image, read_label
from medconv.data.preprocessing.fingerprint import CheckResult, Fingerprint, check, still_invalid
from medconv.data.preprocessing.preprocess import OF_ALL, PreprocessingConfig, preprocess, preprocess_label
from medconv.data.preprocessing.store import Entry, Store, signature
from medconv.utils.atomic_io import write_text
from medconv.utils.threads import each

_VERSION = 3  # part of every config's hash: raise it when preprocessing changes what it writes
_LOCATIONS = 5_000  # foreground voxels kept per class and case

log = logging.getLogger(__name__)


def dataset_folder(cache: Path, dataset: Dataset) -> Path:
    """Where a dataset's fingerprint and stores live: its name and a hash of where its files are, whatever
    their cases.
    """
    places = {str(path.resolve()).replace(case.id, "*") for case in dataset.cases for path in case.files}
    return cache / f"{_safe(dataset.name)}-{_hash(sorted(places))}"


def fingerprint(
    dataset: Dataset, folder: Path, workers: int, skip: bool = False
) -> tuple[Fingerprint, dict[str, str]]:
    """Check all files and measure the dataset, or read what an earlier run found if no file changed since.

    `fingerprint.json` is for people and programs too. Voxel locations by class lie on the prepared grid, and
    so in the store, as every entry's `foreground`.

    Args: skip: leave faulty cases out.
    Returns: the fingerprint of the good cases; case id to fault of the others.
    Raises: ValueError: faults in the dataset, one line each; with `skip`, where no case is good.
    """
    path = folder / "fingerprint.json"
    with _lock(folder):
        sources = _sources(dataset)
        kept = _kept(path, sources)
        if kept is None or (kept.errors and not (skip and still_invalid(dataset, kept.errors))):
            kept = check(dataset, workers, skip)
            for warning in kept.warnings:
                log.warning(warning)
            with _naming(folder):
                write_text(path, json.dumps({**_described(dataset, kept), "sources": sources}, indent=1))
        return kept.fingerprint, {case: "; ".join(found) for case, found in kept.errors.items()}


def prepare(
    dataset: Dataset, config: PreprocessingConfig, folder: Path, workers: int, verify: bool = False
) -> Store:
    """Fill the store of this config; cases that are there, whole and unchanged are left alone.

    At most `workers` cases are in memory at once, each about six times its image in float32, all channels
    together.
    Args: verify: read every entry again and compare its checksums.
    Raises: ValueError: a file at fault, or no room; what was prepared stays.
    """
    meant = [] if dataset.image_targets else [dataset.class_names, *_ignored(dataset)]
    store = Store(folder / _hash([_VERSION, _decisive(config), *meant]))
    with _lock(folder):
        whole = each(
            lambda case: store.has(case, verify), dataset.cases, workers, "verifying" if verify else "looking"
        )
        missing = [case for case, there in zip(dataset.cases, list(whole), strict=True) if not there]
        if missing:
            log.info("preparing %d of %d cases into %s", len(missing), len(dataset.cases), store.folder)
            store.sweep()
            for _ in each(lambda case: _add(store, case, config, dataset), missing, workers, "preparing"):
                pass
    return store


def prepare_case(
    case: Case, config: PreprocessingConfig, num_classes: int, ignore: int | None = None
) -> Entry:
    """One case from its files to what the store holds.

    Args: ignore: the label value of voxels of which nothing is known.
    Raises: ValueError: files that were replaced since they were checked, and are at fault now.
    """
    if case.label is None:
        return _prepare_whole(case, config)
    (native, grid), (native_label, label_grid) = read_image(case.images), read_label(case.label)
    check_same_grid(case.images[0], grid, case.label, label_grid)
    if not np.isfinite(native).all() or native_label[native_label != ignore].max(initial=0) >= num_classes:
        raise _changed(case)
    image, crop_info = preprocess(native, grid, config)
    label = preprocess_label(native_label, crop_info, config, max(num_classes, 1 + (ignore or 0)))
    return Entry(image, label, _places(label, num_classes, ignore), crop_info)


def _prepare_whole(case: Case, config: PreprocessingConfig) -> Entry:
    native, grid = read_image(case.images)
    if not np.isfinite(native).all():
        raise _changed(case)
    return Entry.whole(*preprocess(native, grid, config))


def _changed(case: Case) -> ValueError:
    return ValueError(
        f"case {case.id}: its files have changed since they were checked, and are at fault now; start again"
    )


def _decisive(config: PreprocessingConfig) -> dict[str, Any]:
    """What a prepared case depends on: intensities of the dataset only where they are used."""
    used = [
        known if name in OF_ALL else None
        for name, known in zip(config.normalisation, config.intensities, strict=True)
    ]
    return {**asdict(config), "intensities": used}


def _ignored(dataset: Dataset) -> list[int]:
    """What is added to what identifies a dataset, where some voxels are to be ignored."""
    return [] if dataset.image_targets or dataset.targets.ignore is None else [dataset.targets.ignore]


def _add(store: Store, case: Case, config: PreprocessingConfig, dataset: Dataset) -> None:
    sources = signature(
        case
    )  # from before the files are read: if they change meanwhile, the entry is made anew
    store.write(case, prepare_case(case, config, len(dataset.class_names), dataset.targets.ignore), sources)


def _places(label: np.ndarray, num_classes: int, ignore: int | None) -> np.ndarray:
    """(voxels, 1 + axes) int32: class, then position; spread evenly over each class.

    Where some voxels are to be ignored, class 0 stands for all others, of whatever class.
    """
    rows = [np.empty((0, 1 + label.ndim), np.int32)]
    for value in range(1 if ignore is None else 0, num_classes):
        where = np.flatnonzero(label == value if value else label != ignore)
        places = where[np.linspace(0, len(where) - 1, min(len(where), _LOCATIONS)).astype(np.int64)]
        chosen = np.column_stack(np.unravel_index(places, label.shape))
        rows.append(np.column_stack([np.full(len(chosen), value), chosen]).astype(np.int32))
    return np.concatenate(rows)


def _sources(dataset: Dataset) -> list[Any]:
    """As JSON gives it back; a file that cannot be looked at has no signature, and `check` says so."""
    files = [_signature(case) for case in dataset.cases]
    of_dataset = [dataset.class_names, dataset.modalities, dict(dataset.errors), files, *_ignored(dataset)]
    if dataset.image_targets:
        of_dataset.append([dataset.image_targets.plain(), [case.values for case in dataset.cases]])
    if any(case.split for case in dataset.cases):
        of_dataset.append([case.split for case in dataset.cases])
    return json.loads(json.dumps([_VERSION, *of_dataset]))


def _signature(case: Case) -> list[list[Any]] | None:
    try:
        return signature(case)
    except (OSError, ValueError):
        return None


def _described(dataset: Dataset, found: CheckResult) -> dict[str, Any]:
    """What `fingerprint.json` says: the fingerprint, and what makes it readable by itself."""
    millilitres = [np.prod(spacing) / 1000 for spacing in found.fingerprint.spacings_mm]
    volumes = zip(millilitres, found.fingerprint.class_voxels, strict=True)
    return {
        "fingerprint": asdict(found.fingerprint),
        "cases": [case.id for case in dataset.cases if case.id not in found.errors],
        "class_names": dataset.class_names,
        "modalities": dataset.modalities,
        "class_volumes_ml": [[round(float(n * size), 4) for n in counts] for size, counts in volumes],
        "errors": found.errors,
    }


def _kept(path: Path, sources: list[Any]) -> CheckResult | None:
    """What a file says that was found, if it is of these sources."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = CheckResult(_from_json(content["fingerprint"]), [], content["errors"])
        return known if content["sources"] == sources and isinstance(known.errors, dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # absent, or cut by a power failure
        return None


def _from_json(known: dict[str, Any]) -> Fingerprint:
    return Fingerprint(
        known["spatial_dims"],
        tuple(tuple(s) for s in known["shapes"]),
        tuple(tuple(s) for s in known["spacings_mm"]),
        tuple(known["intensities"]),
        tuple(tuple(c) for c in known["class_voxels"]),
        tuple(known.get("contents", ())),
    )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    with _naming(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not folder.is_dir():
                # else what is complete can be read all the same, and what is not says so when it is written
                raise
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"data.cache_dir: cannot write to {folder} ({error.strerror})") from error


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
