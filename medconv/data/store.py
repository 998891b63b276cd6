"""The store of prepared cases: memory-mapped arrays in one folder per recipe, each case committed by its `.json`.

Reading a patch touches the pages of that patch only, and all workers and ranks of a node share the page cache.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.preprocess import Placement


@dataclass(frozen=True)
class Entry:
    """One prepared case; the arrays are read-only memory maps.

    Shape: image (channels, *spatial) float32; label (*spatial); foreground (voxels, 1 + spatial axes): class and
    position of up to some thousand voxels per class.
    """

    image: np.ndarray
    label: np.ndarray
    foreground: np.ndarray
    placement: Placement


class Store:
    """Prepared cases under `folder`. An entry exists once its `.json` does, which is renamed into place last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, case: Case) -> bool:
        """Whether the case is there and was made from the files as they are now."""
        try:
            return bool(json.loads(self._path(case.id, "json").read_text())["sources"] == signature(case))
        except (FileNotFoundError, ValueError, KeyError):  # absent, or cut by a power failure
            return False

    def write(self, case: Case, entry: Entry) -> None:
        """Add or replace a case; a reader sees the old entry, the new one or none, never a part."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(case.id, "json").unlink(missing_ok=True)
        for name in ("image", "label", "foreground"):
            _replace(self._path(case.id, f"{name}.npy"), partial(np.save, arr=getattr(entry, name)))
        meta = {"sources": signature(case), "placement": asdict(entry.placement)}
        _replace(self._path(case.id, "json"), lambda file: file.write(json.dumps(meta).encode()))

    def sweep(self) -> None:
        """Remove what killed writers left behind; only while nobody writes."""
        for partial_file in self.folder.glob(".*"):
            partial_file.unlink()

    def read(self, case_id: str) -> Entry:
        """Raises: ValueError: the case is not in the store, or its files are damaged."""
        try:
            arrays = {n: np.load(self._path(case_id, f"{n}.npy"), mmap_mode="r") for n in ("image", "label", "foreground")}
            return Entry(**arrays, placement=self.placement(case_id))
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise ValueError(f"case {case_id}: its prepared files in {self.folder} cannot be read ({error})") from error

    def placement(self, case_id: str) -> Placement:
        known: dict[str, Any] = json.loads(self._path(case_id, "json").read_text())["placement"]
        shape, affine = known["grid"]["shape"], known["grid"]["affine"]
        return Placement(
            Grid(tuple(shape), tuple(tuple(row) for row in affine)),
            tuple(known["shape"]),
            tuple((a, b) for a, b in known["box"]),
        )

    def _path(self, case_id: str, suffix: str) -> Path:
        return self.folder / f"{case_id}.{suffix}"


def signature(case: Case) -> list[list[Any]]:
    """What tells whether a case's files changed: path, size in bytes and time of change of each."""
    return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in case.files]


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    with partial.open("wb") as file:
        write(file)
    partial.replace(path)
