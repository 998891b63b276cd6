"""Reports of the cases that an earlier check has read: only new and changed files are read again."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from medconv.data.case import Case, Dataset, Grid
from medconv.data.preprocessing.examine import VERSION, CaseReport, examine, samples_per_case
from medconv.data.preprocessing.store import signature

_FILE = "examined.jsonl"
_ARRAYS = ("intensities", "thickness_mm")


class Examined:
    """The reports of a dataset, a line of JSON each. A line is added as soon as a case was read, so a check
    that was stopped goes on where it was. Cases with errors are always read again: granting a permission, for
    example, changes no file.

    Args:
        folder: of the dataset, in the cache. Where it cannot be written, nothing is remembered.
    """

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self._dataset = dataset
        self._path = folder / _FILE
        self._lock = Lock()
        self._can_write = True
        without_cases = replace(dataset, cases=(), errors={})
        self._depends_on = [VERSION, samples_per_case(dataset), repr(without_cases)]
        self._lines = _lines_of(self._path)

    def examine(self, case: Case) -> CaseReport:
        """As `examine`."""
        # Before reading: if the files change meanwhile, they are read again next time.
        key = self._key(case)
        if key in self._lines and case.id not in self._dataset.errors:
            report = _report(self._lines[key])
            if report is not None:
                return report
        report = examine(case, self._dataset)
        if key and not report.errors:
            self._add(key, report)
        return report

    def _key(self, case: Case) -> str:
        """A hash of all that a report depends on; "" if the files cannot be examined."""
        try:
            files = signature(case)
        except (OSError, ValueError):
            return ""
        content = json.dumps([*self._depends_on, files, repr(case)])
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    def _add(self, key: str, report: CaseReport) -> None:
        # It begins a line, since a full disk may have cut the one before.
        line = f"\n{key} {json.dumps(_plain(report))}"
        with self._lock:
            if not self._can_write:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # In one piece, since other processes may add lines, too.
                with self._path.open("ab", buffering=0) as file:
                    file.write(line.encode())
            except OSError:
                self._can_write = False


def _lines_of(path: Path) -> dict[str, str]:
    """Key to JSON text; the last line counts."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines: dict[str, str] = {}
    for line in text.splitlines():
        key, _, content = line.partition(" ")
        lines[key] = content
    return lines


def _plain(report: CaseReport) -> dict[str, Any]:
    content = {field.name: getattr(report, field.name) for field in fields(report)}
    content["grid"] = report.grid and asdict(report.grid)
    for name in _ARRAYS:
        array = content[name]
        if array is not None:
            data = base64.b64encode(array.tobytes()).decode()
            content[name] = [array.dtype.str, list(array.shape), data]
    return content


def _report(line: str) -> CaseReport | None:
    """None: the line was cut by a full disk or a power failure."""
    try:
        content = json.loads(line)
        grid = content["grid"]
        if grid is not None:
            affine = tuple(map(tuple, grid["affine"]))
            content["grid"] = Grid(tuple(grid["shape"]), affine)
        for name in _ARRAYS:
            if content[name] is not None:
                dtype, shape, data = content[name]
                # A copy, since an array of bytes cannot be changed.
                content[name] = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        for name in ("no_data", "shape", "spacing_mm", "class_voxels"):
            content[name] = tuple(content[name])
        return CaseReport(**content)
    except (ValueError, TypeError, KeyError):
        return None
