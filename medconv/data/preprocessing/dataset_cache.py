"""What is made of a dataset once and kept in the cache: its fingerprint, and a store of prepared cases.

Several processes may call this at once (ranks, nodes on a shared filesystem): one works, the others wait.
"""

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.check import CheckResult, Examined, check, still_invalid
from medconv.data.preprocessing.compressed import Compression
from medconv.data.preprocessing.examine import REPORT_VERSION, CaseReport
from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.data.preprocessing.normalisation import DATASET_NORMALISATIONS
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_case
from medconv.data.preprocessing.store import BROKEN, Store, signature
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils import locks
from medconv.utils.atomic_io import NO_ACCESS, write_text
from medconv.utils.cluster import has_neighbours
from medconv.utils.errors import ArgumentError, explained, reason
from medconv.utils.locks import Claims
from medconv.utils.logging import size_text
from medconv.utils.progress import each

_STORE_VERSION = 5  # part of every store's hash: raise it when preprocessing changes its output
# Bytes of a store whose checksums are compared at each start: 76 MB take 0.04 s, less than 1 % of a start
_VERIFIED_AT_START = 256 * 2**20

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def dataset_folder(cache: Path, dataset: Dataset) -> Path:
    """The folder of a dataset's fingerprint and stores: its name and a hash of its files' paths."""
    # Without case ids, so that further cases of the same folders do not change it; of a link to a file its
    # own place, as a store of large files (git-annex) has another target for each content.
    places = [(case.id, path.parent.resolve() / path.name) for case in dataset.cases for path in case.files]
    home = Path("/")  # folders above all cases keep their names
    if len(dataset.cases) > 1 and places:
        home = Path(os.path.commonpath([place.parent for _, place in places]))
    paths = set()
    for case_id, place in places:
        parts = [_without_id(part, case_id) for part in place.relative_to(home).parts]
        paths.add(str(home.joinpath(*parts)))
    # File systems or shells do not take other characters.
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in dataset.name)
    return cache / f"{name}-{_hash(sorted(paths))}"


def _without_id(name: str, case_id: str) -> str:
    """A name with `*` for the case id, as a word of its own if there is one, and not inside of a number."""
    for letter in (r"[^\W_]", r"\d"):
        pattern = rf"(?<!{letter}){re.escape(case_id)}(?!{letter})"
        replaced, count = re.subn(pattern, "*", name, count=1)
        if count:
            return replaced
    return name


def examined(dataset: Dataset, folder: Path, workers: int | None) -> Callable[[Case], CaseReport]:
    """The reports of a dataset's cases, all read by now: of processes that call this, each reads its share.

    Args:
        folder: of the dataset, in the cache. Where it has no locks, each process reads all cases.
    """
    memory = Examined(dataset, folder)
    claims = Claims(folder / ".checking")
    try:
        with _lock(folder):
            claims.join()
    except (ArgumentError, OSError, NotImplementedError):
        return memory.examine
    reports = _shared(claims, folder, memory.examine, dataset.cases, workers, "checking")
    return lambda case: reports[case.id]


def cached_fingerprint(
    dataset: Dataset, folder: Path, workers: int | None = None, skip: bool = False
) -> tuple[Fingerprint, dict[str, str]]:
    """Check all files and measure the dataset, or read `fingerprint.json` if no file has changed since.

    Returns:
        The fingerprint of the valid cases; case id to error of the skipped ones.
    Raises:
        ValueError: errors in the dataset, one line each; with `skip`, if no case is valid.
    """
    path = folder / "fingerprint.json"
    sources = sources_of(dataset)
    with _lock(folder):
        result = _earlier_result(path, sources, dataset, skip)
    if result is None:
        examine_case = examined(dataset, folder, workers)
        with _lock(folder):
            result = _earlier_result(path, sources, dataset, skip)  # of another process
            if result is None:
                result = check(dataset, workers, skip, examine_case)
                for warning in result.warnings:
                    log.warning(warning)
                content = {**_to_json(dataset, result), "sources": sources}
                with _writing(folder):
                    write_text(path, json.dumps(content, indent=1))
    error_of_case = {case_id: "; ".join(errors) for case_id, errors in result.errors.items()}
    return result.fingerprint, error_of_case


def fill_store(
    dataset: Dataset,
    config: PreprocessingConfig,
    folder: Path,
    workers: int | None,
    verify: bool = False,
    compresses: bool = False,
) -> Store:
    """Fill the store of this config; cases that are complete and unchanged are not prepared again.

    At most `workers` cases are in memory at once, each about four times its float32 image. Several processes
    that call this share the cases; each returns when all are prepared.
    Args:
        verify: read every entry again and compare its checksums; of a small store, this is done anyway.
        compresses: a store apart, whose arrays are compressed.
    Raises:
        ValueError: an invalid file, or no space left; finished cases stay.
    """
    store = Store(folder / _store_name(dataset, config))
    if compresses:
        store = Store(store.folder.with_name(f"{store.folder.name}-blosc2"), Compression(config.slice_axis))
    verify = verify or store.size() <= _VERIFIED_AT_START
    activity = "verifying" if verify else "looking"
    is_present = each(lambda case: store.has(case, verify), dataset.cases, workers, activity)
    pairs = zip(dataset.cases, list(is_present), strict=True)
    missing = [case for case, present in pairs if not present]
    if not missing:
        return store
    log.info("preparing %d of %d cases into %s", len(missing), len(dataset.cases), store.folder)
    claims = Claims(store.folder / ".claims")
    with _lock(folder), _writing(store.folder):
        if not claims.is_shared():  # what killed processes left
            for path in store.folder.glob(".*.*.*"):
                with suppress(OSError):  # a file of the file system itself
                    if re.match(r"\.\d+\.", path.name):  # as `atomic_io.replacing` names partial files
                        path.unlink()
        claims.join()

    def prepare(case: Case) -> None:
        # Another process may have prepared it since.
        if store.has(case, verify):
            return
        sources = signature(case)  # before reading: if the files change meanwhile, it is prepared again
        memory_error = (
            f"case {case.id}: memory ran out while it was prepared, at {size_text(config.spacing_mm)} mm "
            "(spacing_mm); prepare_workers=1 has one case at a time in memory"
        )
        with explained(memory_error, MemoryError):
            entry = preprocess_case(case, config, len(dataset.class_names), dataset.targets)
            store.write(case, entry, sources)

    _shared(claims, folder, prepare, missing, workers, "preparing")
    return store


def _shared(
    claims: Claims,
    folder: Path,
    work: Callable[[Case], Result],
    cases: Sequence[Case],
    workers: int | None,
    activity: str,
) -> dict[str, Result]:
    """The results of work on all cases, by id; each process that has joined the claims does a share of it.

    Args:
        claims: left at the end.
        folder: whose lock the processes use to join and leave.
        work: of a case that another process has done, it finds the result.
        activity: as `each` names it.
    """
    results: dict[str, Result] = {}

    def claim(case: Case) -> None:
        lock = claims.lock(case.id)
        if locks.acquired(lock):  # else another process is at work on it
            try:
                results[case.id] = work(case)
            finally:
                lock.release()

    # The ranks of a run take turns on each machine, as each has several cases in memory.
    turn = locks.held(claims.lock(f".{socket.gethostname()}")) if has_neighbours() else nullcontext()
    try:
        with turn:
            list(each(claim, cases, workers, activity))
            for case in cases:
                if case.id not in results:  # another process has done it by then, or has ended
                    with locks.held(claims.lock(case.id)):
                        results[case.id] = work(case)
        return results
    finally:
        with _lock(folder):
            claims.leave()


def _store_name(dataset: Dataset, config: PreprocessingConfig) -> str:
    """A hash of all that a prepared case depends on, besides its files."""
    # Intensities of the dataset only where they are used.
    intensities = [
        statistics if name in DATASET_NORMALISATIONS else None
        for name, statistics in zip(config.normalisation, config.intensities, strict=True)
    ]
    settings = {**asdict(config), "intensities": intensities}
    names = [dataset.class_names] if config.frame is None else []  # whole images with values have no labels
    # a version of their own, since an earlier one drew them on the grid of the files
    draws = isinstance(dataset.targets, SegmentationTargets) and dataset.targets.draws_classes
    return _hash([_STORE_VERSION, settings, *names, *_declared(dataset), *(["drawn"] if draws else [])])


def _declared(dataset: Dataset) -> list[Any]:
    """What `dataset` declares of its files, as an addition to a hash: the value to ignore, how labels that
    are no label maps are prepared, and by case id in what its headers and label values are to be read
    otherwise. Empty for most, whose files say all.
    """
    statements: dict[str, list[Any]] = {}
    for case in dataset.cases:
        if case.source_spacing_mm is not None or case.relabel is not None:
            statements[case.id] = [case.source_spacing_mm, case.relabel]
        if case.soft_label is not None:
            declared_of_label = case.soft_label.declared(case)
            statements[case.id] = [case.source_spacing_mm, case.relabel, *declared_of_label]
        if case.missing_channels:
            statements[case.id] = [*statements.get(case.id, []), case.missing_channels]
    declared: list[Any] = [] if dataset.targets.ignore is None else [dataset.targets.ignore]
    own_labels = dataset.targets.family.own("labels")
    settings = own_labels and own_labels.settings(dataset.targets)
    if settings is not None:
        declared.append(settings)
    return [*declared, statements] if statements else declared


def sources_of(dataset: Dataset) -> list[Any]:
    """Everything the fingerprint depends on, as JSON reads it back; None for unreadable files."""
    content = [
        dataset.class_names,
        dataset.modalities,
        dict(dataset.errors),
        [signature(case) for case in dataset.cases],
        # What most datasets lack is left out, not null: their fingerprints stay valid.
        *_declared(dataset),
    ]
    if any(case.values is not None for case in dataset.cases):  # of whole images
        # as text, since a missing value, NaN, is not equal to itself
        values = [repr(case.values) for case in dataset.cases]
        content.append([dataset.targets.plain(), values])
    if any(case.split for case in dataset.cases):
        content.append([case.split for case in dataset.cases])
    sources: list[Any] = json.loads(json.dumps([REPORT_VERSION, *content]))
    return sources


def _to_json(dataset: Dataset, result: CheckResult) -> dict[str, Any]:
    """The content of `fingerprint.json`: the fingerprint, with names and volumes for readers."""
    volumes_ml = []
    measured = result.fingerprint
    for spacing_mm, class_voxels in zip(measured.spacings_mm, measured.class_voxels, strict=True):
        voxel_ml = np.prod(spacing_mm) / 1000
        volumes_ml.append([round(float(voxels * voxel_ml), 4) for voxels in class_voxels])
    return {
        "fingerprint": asdict(measured),
        "cases": [case.id for case in dataset.cases if case.id not in result.errors],
        "class_names": dataset.class_names,
        "modalities": dataset.modalities,
        "class_volumes_ml": volumes_ml,
        "errors": result.errors,
    }


def _earlier_result(path: Path, sources: list[Any], dataset: Dataset, skip: bool) -> CheckResult | None:
    """An earlier result. None: there is none, the sources have changed, or it had errors, unless these are to
    be skipped and still there.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = {key: _as_tuples(value) for key, value in content["fingerprint"].items()}
        errors = content["errors"]
        if content["sources"] != sources or not isinstance(errors, dict):
            return None
        result = CheckResult(Fingerprint(**measured), [], errors)
    except BROKEN:  # absent, or cut by a power failure
        return None
    is_current = not errors or (skip and still_invalid(dataset, errors))
    return result if is_current else None


def _as_tuples(content: Any) -> Any:
    """JSON's lists as tuples."""
    if not isinstance(content, list):
        return content
    return tuple(map(_as_tuples, content))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises: ArgumentError: the folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise ArgumentError("cache_dir", f": cannot write to {folder} ({reason(error)})") from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    with _writing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locks.take(lock)
        except OSError as error:
            if error.errno not in NO_ACCESS or not folder.is_dir():
                raise  # otherwise a complete store can still be read, and writing to it gives its own error
    try:
        yield
    finally:
        lock.release()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
