"""The output folder of an image-level network: `predictions.csv`, one row per case, and its manifest.

Rows are appended as cases are predicted, so that a stopped command can resume; at the end the table is
written again in the order of the cases.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from medconv.data.case import Case
from medconv.inference.manifest import MANIFEST, OutputState, differences, entry, read
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some

TABLE = "predictions.csv"
SALIENCY = "saliency"
CASE_COLUMNS = ("case", "predicted")  # all other columns are outputs


class OutputTable:
    """Where predictions of image-level networks go.

    Args: settings: what determines the predictions, by name; they are the same for all rows of a table.
    about: what else the manifest says.
    """

    def __init__(
        self,
        path: Path,
        image_targets: ImageLevelTargets,
        settings: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        self.path, self.image_targets = path, image_targets
        self.settings = json.loads(json.dumps({**settings, "targets": image_targets.plain()}))
        self.about = {**about, "targets": image_targets.plain()}
        self.rows: dict[str, list[str]] = {}

    @property
    def header(self) -> list[str]:
        return [
            "case",
            *self.image_targets.prediction_columns,
            *map(column_of, self.image_targets.names),
        ]

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[list[Case]]:
        """Gives the cases that are still to be predicted.

        Raises: ValueError: it holds other results (`overwrite` removes those of `cases`); another process
            writes there; or it cannot be written.
        """
        lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
            self._begin(cases, overwrite)
        except Timeout as error:
            raise self._refusal("another process writes its predictions there") from error
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            lock.release()
            raise self._refusal(f"cannot be written ({getattr(error, 'strerror', None) or error})") from error
        except BaseException:
            lock.release()
            raise
        try:
            yield [case for case in cases if case.id not in self.rows]
            self._write(cases)
        finally:
            lock.release()

    def add(self, cases: Sequence[Case], outputs: np.ndarray) -> None:
        """Append a row per case. Raises: OSError: the disk is full, or no permission."""
        text = io.StringIO(newline="")
        for case, values in zip(cases, outputs, strict=True):
            predicted = self.image_targets.prediction_cells(values)
            self.rows[case.id] = [case.id, *predicted, *(f"{value:.8g}" for value in values)]
            csv.writer(text, lineterminator="\n").writerow(self.rows[case.id])
        with (self.path / TABLE).open("a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text.getvalue())

    def saliency(self, case: str) -> Path:
        """Where the picture of a case's saliency map goes."""
        return self.path / SALIENCY / f"{case}.png"

    def _begin(self, cases: Sequence[Case], overwrite: bool) -> None:
        manifest, entries = read(self.path), {case.id: entry(case.images) for case in cases}
        rows = self._read()
        if unlisted := [case for case in rows if case not in manifest.get("cases", {})]:
            raise self._refusal(
                f"holds predictions that {MANIFEST} does not list, such as {unlisted[0]}; take another folder"
            )
        if manifest and not (self.path / TABLE).exists():
            raise self._refusal("holds label maps; take another folder")
        differing = differences(manifest["settings"], self.settings) if manifest else []
        state = OutputState(manifest.get("cases", {}), [], differing, list(rows), False)
        if not overwrite and (conflict := state.conflict(entries, [])):
            raise self._refusal(f"{conflict}; take another folder, or --overwrite to replace them")
        others = [case for case in rows if case not in entries]
        if differing and others:
            raise self._refusal(
                "--overwrite would keep predictions made with other settings, of cases that are not in "
                f"--input: {some(others)}; take another folder"
            )
        self.rows = {case: row for case, row in rows.items() if not (overwrite and case in entries)}
        manifest = {
            **self.about,
            "settings": self.settings,
            "cases": {**state.listed, **entries},
            "overwriting": [],
        }
        self._write([])
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"--output {self.path}: {reason}")

    def _read(self) -> dict[str, list[str]]:
        """The complete rows; a last line without an end was cut off when its process was killed."""
        try:
            text = (self.path / TABLE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            raise self._refusal(f"{TABLE} there is not a text file; take another folder") from error
        complete = text[: text.rfind("\n") + 1]
        rows = list(csv.reader(io.StringIO(complete)))
        return {row[0]: row for row in rows[1:] if row}

    def _write(self, cases: Sequence[Case]) -> None:
        """Write the table: these cases first, in their order, then its other rows."""
        text = io.StringIO(newline="")
        order = dict.fromkeys([*(case.id for case in cases if case.id in self.rows), *self.rows])
        csv.writer(text, lineterminator="\n").writerows([self.header, *(self.rows[case] for case in order)])
        write_text(self.path / TABLE, text.getvalue())


def column_of(name: str) -> str:
    """The column of the output with this name."""
    return f"output/{name}" if name in CASE_COLUMNS else name
