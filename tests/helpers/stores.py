"""Checks on the store of prepared cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from helpers.volumes import preprocessing_config

from medconv.data.case import Dataset
from medconv.data.preprocessing import store as store_module
from medconv.data.preprocessing.preprocess import preprocess_case
from medconv.data.preprocessing.store import Store
from medconv.utils import atomic_io

ARRAYS = ("image", "label", "foreground")


def times(store: Store) -> dict[str, int]:
    """File name to modification time."""
    return {path.name: path.stat().st_mtime_ns for path in store.folder.iterdir()}


def rewritten(store: Store, before: dict[str, int]) -> set[str]:
    """Cases with files that are new or changed since `before`; none may be missing."""
    now = times(store)
    assert before.keys() <= now.keys()
    return {name.split(".")[0] for name in now if before.get(name) != now[name]}


def assert_complete(store: Store, dataset: Dataset) -> None:
    """The store has every case, as `preprocess_case` makes it."""
    for case in dataset.cases:
        assert store.has(case)
        entry = store.read(case.id)
        expected = preprocess_case(case, preprocessing_config(), len(dataset.class_names))
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(entry, name), getattr(expected, name))
        assert entry.crop_info == expected.crop_info


def touch(path: Path) -> None:
    """Change a file's time but not its content."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_a_byte_unnoticed(path: Path) -> None:
    """Change a byte, but neither size nor time."""
    stat = path.stat()
    change_a_byte(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextmanager
def before_each_file(act: Callable[[Path], None]) -> Iterator[None]:
    """Call `act` right before a file of the store is renamed into place."""
    real = atomic_io.replacing

    @contextmanager
    def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
        with real(path, durable) as partial:
            yield partial
            act(path)

    atomic_io.replacing = store_module.replacing = replacing
    try:
        yield
    finally:
        atomic_io.replacing = store_module.replacing = real
