"""The folder of predictions: what made them, which are done, and which another process has in hand.

A case is done once its label map has its name, and the folder's record says that the same networks and settings made it. Who
works on a case holds a lock on a file, which the system lets go when its process ends, in whatever way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medconv.atomic import write_text
from medconv.data.case import Case

RECORD = "prediction.json"  # beside the predictions: what made them
PROBABILITIES = "probabilities"
_LABEL = ".nii.gz"
_PARTIAL = re.compile(r"\.\d+\..*")  # what `atomic.replacing` leaves of a killed process
_SHOWN = 5


class Folder:
    """Where predictions go.

    Args:
        settings: what decides the results, by name; a folder has one set of them.
        about: what else its record says.
        probabilities: whether they are written, too.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any], probabilities: bool = False
    ) -> None:
        self.path, self.about, self.writes_probabilities = path, dict(about), probabilities
        self.settings = json.loads(json.dumps({**settings, "probabilities": probabilities}))
        self.skipped: list[str] = []
        self.elsewhere: list[str] = []
        self._claims, self._lock = path / ".claims", FileLock(path / ".lock")
        self._mine = FileLock(self._claims / f"{socket.gethostname()}-{os.getpid()}-{id(self)}.process", thread_local=False)

    def label(self, case: str) -> Path:
        return self.path / f"{case}{_LABEL}"

    def probabilities(self, case: str) -> Path:
        return self.path / PROBABILITIES / f"{case}{_LABEL}"

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """Inside, this process is one of those that work here.

        Raises: ValueError: it holds other results, which `overwrite` removes as far as they belong to `cases`; or it cannot
            be written.
        """
        images = {case.id: [str(path.absolute()) for path in case.images] for case in cases}
        if own := [case for case, paths in images.items() if str(self.label(case).absolute()) in paths]:
            raise ValueError(f"--output {self.path}: would replace the images themselves, such as {self.label(own[0])}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock:
                self._begin(images, overwrite)
        except (OSError, NotImplementedError) as error:  # the latter: no locks there
            raise ValueError(f"--output {self.path}: cannot be written ({_reason(error)})") from error
        try:
            yield
        finally:
            with self._lock:
                self._end()

    def claims(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Callable[[], None]]]:
        """Cases to do, one after the other, each with a function to call when it is done or has failed.

        Those in another process's hands are tried again at the end, and then left to it.
        """
        late: list[Case] = []
        for last, several in ((False, cases), (True, late)):
            for case in several:
                lock = FileLock(self._claims / f"{case.id}.lock", thread_local=False)
                if self._free(case, lock):
                    yield case, lock.release
                elif self.label(case.id).exists():
                    self.skipped.append(case.id)
                elif last:
                    self.elsewhere.append(case.id)
                else:
                    late.append(case)

    def _free(self, case: Case, lock: FileLock) -> bool:
        if self.label(case.id).exists() or not _acquired(lock):
            return False
        if self.label(case.id).exists():  # by now
            lock.release()
            return False
        return True

    def _begin(self, images: dict[str, list[str]], overwrite: bool) -> None:
        known, busy = self._record(), self._others()
        changed = _differences(known["settings"], self.settings) if known else []
        fault = self._fault(known, changed, images, busy)
        if fault and (busy or not overwrite):
            advice = "another process is at work there" if busy else "take another folder, or --overwrite to replace them"
            raise ValueError(f"--output {self.path}: {fault}; {advice}")
        strangers = [case for case in self._there() if case in known.get("cases", {}) and case not in images]
        if changed and strangers:
            raise ValueError(
                f"--output {self.path}: --overwrite would leave results there that were made otherwise, of cases that "
                f"--input does not name: {_some(strangers)}; take another folder"
            )
        self._claims.mkdir(exist_ok=True)
        if not busy:
            self._clean([*images] if overwrite else [])
        before = {} if changed else known.get("cases", {})
        record = {**self.about, "settings": self.settings, "cases": {**before, **_entries(images)}}
        write_text(self.path / RECORD, json.dumps(record, indent=2) + "\n")
        self._mine.acquire()

    def _end(self) -> None:
        self._mine.release()
        Path(self._mine.lock_file).unlink(missing_ok=True)
        if not self._others():
            shutil.rmtree(self._claims, ignore_errors=True)

    def _record(self) -> dict[str, Any]:
        """Empty where there is none, or one of before settings were recorded, or none that can be read."""
        try:
            known = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
            assert isinstance(known["settings"], dict)
            known["cases"] = _entries({case: list(entry["images"]) for case, entry in known["cases"].items()})
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
            return {}
        return dict(known)

    def _there(self) -> list[str]:
        return sorted(path.name.removesuffix(_LABEL) for path in self.path.glob(f"*{_LABEL}") if path.name[0] != ".")

    def _fault(self, known: dict[str, Any], changed: Sequence[str], images: dict[str, list[str]], busy: bool) -> str | None:
        """Why what is here, or about to be, cannot stay beside new results."""
        there = self._there()
        if not there and not busy:
            return None
        if not known:
            return f"holds label maps that no {RECORD} accounts for, such as {there[0]}{_LABEL}" if there else None
        if changed:
            return f"holds results that were made otherwise ({'; '.join(changed)})"
        before = {case: known["cases"][case]["images"] for case in there if case in known["cases"] and case in images}
        if moved := [case for case, paths in before.items() if paths != images[case]]:
            return f"holds a case {moved[0]} of another image, {before[moved[0]][0]}, not {images[moved[0]][0]}"
        return None

    def _others(self) -> bool:
        """Whether another process is at work here; locks of dead ones are removed."""
        alive = False
        for path in self._claims.glob("*.process"):
            lock = FileLock(path)
            if _acquired(lock):
                lock.release()
                path.unlink(missing_ok=True)
            else:
                alive = True
        return alive

    def _clean(self, replaced: Sequence[str]) -> None:
        for path in [*self.path.glob(f".*{_LABEL}"), *(self.path / PROBABILITIES).glob(f".*{_LABEL}")]:
            if _PARTIAL.fullmatch(path.name):
                path.unlink()
        for case in replaced:
            self.label(case).unlink(missing_ok=True)
            self.probabilities(case).unlink(missing_ok=True)


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def _entries(images: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {case: {"images": list(paths)} for case, paths in images.items()}


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys([*here, *there])
    return [f"{key}: {there.get(key)} there, {here.get(key)} now" for key in keys if there.get(key) != here.get(key)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
