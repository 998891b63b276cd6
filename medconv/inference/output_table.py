"""The folder of answers for whole images: `predictions.csv`, a row per case, and the record of what made
them.

Rows are added as they are made, so that a command that was stopped goes on; at the end they stand in the
order of the cases.
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
from medconv.inference.manifest import RECORD, Found, entry, read
from medconv.inference.manifest import differences as differing
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some

TABLE = "predictions.csv"
SALIENCY = "saliency"
OTHERS = ("case", "predicted")  # columns that are no output


class Answers:
    """Where answers go.

    Args: settings: what decides them, by name; a folder has one set of them. about: what else its record
    says.
    """

    def __init__(
        self,
        path: Path,
        image_targets: ImageLevelTargets,
        settings: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        self.path, self.image_targets = path, image_targets
        self.settings = json.loads(json.dumps({**settings, "image_targets": image_targets.plain()}))
        self.about = {**about, "image_targets": image_targets.plain()}
        self.rows: dict[str, list[str]] = {}

    @property
    def header(self) -> list[str]:
        return [
            "case",
            *(["predicted"] if self.image_targets.kind == "multiclass" else []),
            *map(column_of, self.image_targets.names),
        ]

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[list[Case]]:
        """Gives the cases that are still to be done.

        Raises: ValueError: it holds other results, which `overwrite` removes as far as they belong to
            `cases`; another process is at work there; or it cannot be written.
        """
        lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
            self._begin(cases, overwrite)
        except Timeout as error:
            raise ValueError(f"--output {self.path}: another process writes its answers there") from error
        except (OSError, NotImplementedError) as error:  # the latter: no locks there
            raise ValueError(
                f"--output {self.path}: cannot be written ({getattr(error, 'strerror', None) or error})"
            ) from error
        try:
            yield [case for case in cases if case.id not in self.rows]
            self._write(cases)
        finally:
            lock.release()

    def add(self, cases: Sequence[Case], outputs: np.ndarray) -> None:
        """Raises: OSError: no room, or no permission."""
        text = io.StringIO(newline="")
        for case, values in zip(cases, outputs, strict=True):
            called = (
                [self.image_targets.names[int(values.argmax())]]
                if self.image_targets.kind == "multiclass"
                else []
            )
            self.rows[case.id] = [case.id, *called, *(f"{value:.8g}" for value in values)]
            csv.writer(text, lineterminator="\n").writerow(self.rows[case.id])
        with (self.path / TABLE).open("a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text.getvalue())

    def picture(self, case: str) -> Path:
        return self.path / SALIENCY / f"{case}.png"

    def _begin(self, cases: Sequence[Case], overwrite: bool) -> None:
        known, entries = read(self.path), {case.id: entry(case.images) for case in cases}
        rows = self._read()
        if strange := [case for case in rows if case not in known.get("cases", {})]:
            raise self._refusal(
                f"holds answers that no {RECORD} accounts for, such as {strange[0]}; take another folder"
            )
        if known and not (self.path / TABLE).exists():
            raise self._refusal("holds label maps; take another folder")
        unlike = differing(known["settings"], self.settings) if known else []
        found = Found(known.get("cases", {}), [], unlike, list(rows), False)
        if not overwrite and (fault := found.fault(entries, [])):
            raise self._refusal(f"{fault}; take another folder, or --overwrite to replace them")
        others = [case for case in rows if case not in entries]
        if unlike and others:
            raise self._refusal(
                "--overwrite would leave answers there that were made otherwise, of cases that --input "
                f"does not name: {some(others)}; take another folder"
            )
        self.rows = {case: row for case, row in rows.items() if not (overwrite and case in entries)}
        record = {
            **self.about,
            "settings": self.settings,
            "cases": {**found.before, **entries},
            "overwriting": [],
        }
        self._write([])
        write_text(self.path / RECORD, json.dumps(record, indent=2) + "\n")

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"--output {self.path}: {reason}")

    def _read(self) -> dict[str, list[str]]:
        """Whole rows of this kind; a last one that was being written when the process ended is none."""
        try:
            text = (self.path / TABLE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except UnicodeDecodeError as error:
            raise self._refusal(f"{TABLE} there is no text; take another folder") from error
        whole = text[: text.rfind("\n") + 1]
        rows = list(csv.reader(io.StringIO(whole)))
        return {row[0]: row for row in rows[1:] if row}

    def _write(self, cases: Sequence[Case]) -> None:
        """The whole table: these cases first, in their order, then the others that it has."""
        text = io.StringIO(newline="")
        order = dict.fromkeys([*(case.id for case in cases if case.id in self.rows), *self.rows])
        csv.writer(text, lineterminator="\n").writerows([self.header, *(self.rows[case] for case in order)])
        write_text(self.path / TABLE, text.getvalue())


def column_of(name: str) -> str:
    """Of an output by this name."""
    return f"output/{name}" if name in OTHERS else name
