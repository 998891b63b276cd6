"""An output folder: which cases are done, whether new predictions fit beside old ones, and who works there.

Its manifest says which networks and settings made the predictions. A process that works in it holds a file
lock, which the operating system releases when the process ends, even if it is killed.
"""

import json
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from medconv.data.case import Case
from medconv.inference.manifest import MANIFEST, Entry, OutputState, differences, entry, read
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some

Claim = tuple[Case, Callable[[], None]]  # a case to predict, and what to call when it is done or has failed


class Output(ABC):
    """Where predictions go.

    Args:
        settings: what determines the predictions, by name; they are the same for all of a folder.
        about: what else the manifest says; of `train_cases`, those that are cases of the folder.
        what: predictions, for messages. earlier: how those came about that are not made now, likewise.
        skipped, claimed_by_others: cases that `claims` did not give.
    """

    what: ClassVar[str]
    earlier: ClassVar[str] = "before"

    def __init__(self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.path, self.about = path, dict(about)
        self.settings = json.loads(json.dumps(settings))
        self.skipped: list[str] = []
        self.claimed_by_others: list[str] = []
        self._claims, self._lock = path / ".claims", FileLock(path / ".lock")
        self._process_lock = FileLock(
            self._claims / f"{socket.gethostname()}-{os.getpid()}-{id(self)}.process", thread_local=False
        )

    @property
    def place(self) -> Path:
        """The file or folder with the predictions."""
        return self.path

    @abstractmethod
    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        """Cases to predict, one after the other."""

    @abstractmethod
    def write(self, predictor: Any, case: Case, scores: Any) -> None:
        """Write a case's prediction, from what `predictor.scores` gave; files beside it come first, so that a
        case with a prediction is done. Raises: OSError: the disk is full, or no permission.
        """

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """Register this process as working here, until the context ends.

        Raises: ValueError: it holds other results (`overwrite` removes those of `cases` that the manifest
            lists), or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock:
                self._begin({case.id: entry(case.images) for case in cases}, overwrite)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            raise self._refusal(f"cannot be written ({getattr(error, 'strerror', None) or error})") from error
        completed = False
        try:
            yield
            completed = True
        finally:
            with self._lock:
                self._end(completed)

    @abstractmethod
    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        """Cases with a prediction. Raises: ValueError: predictions of another kind are here."""

    @abstractmethod
    def _clean(self, replaced: Sequence[str]) -> None:
        """Remove what killed processes left, and the predictions of these cases."""

    def _name(self, case: str) -> str:
        """A case's prediction, for messages."""
        return case

    def _begin(self, cases: dict[str, Entry], overwrite: bool) -> None:
        state = self._state()
        renewed = state.renewed(cases)
        replaced = [case for case in cases if case not in renewed] if overwrite else []
        self._check(state, cases, overwrite, replaced)
        self._claims.mkdir(exist_ok=True)
        if not state.busy:
            self._clean(replaced)
        previous = {} if state.differences else state.listed
        self._write_manifest({**previous, **cases}, sorted({*renewed, *replaced}))
        self._process_lock.acquire()

    def _check(
        self, state: OutputState, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]
    ) -> None:
        """Raises: ValueError: existing results do not fit beside new ones, and must not be replaced."""
        if unlisted := [case for case in state.existing if case not in state.listed]:
            raise self._refusal(
                f"holds {self.what} that {MANIFEST} does not list, such as {self._name(unlisted[0])}; take "
                "another folder, or remove them"
            )
        conflict = state.conflict(cases, replaced)
        if conflict and (state.busy or not overwrite):
            advice = (
                "another process is at work there"
                if state.busy
                else "take another folder, or --overwrite to replace them"
            )
            raise self._refusal(f"{conflict}; {advice}")
        if state.differences and (others := [case for case in state.existing if case not in cases]):
            raise self._refusal(
                "--overwrite would keep results made with other settings, of cases that are not in --input: "
                f"{some(others)}; take another folder"
            )

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"--output {self.path}: {reason}")

    def _end(self, completed: bool) -> None:
        """Args: completed: this process did all its cases; if it was the last one, `--overwrite` is
        finished.
        """
        self._process_lock.release()
        Path(self._process_lock.lock_file).unlink(missing_ok=True)
        if not self._is_shared():
            shutil.rmtree(self._claims, ignore_errors=True)
            manifest = read(self.path) if completed else {}
            if manifest.get("overwriting"):
                with suppress(OSError):  # the disk is full: all cases are done nevertheless
                    self._write_manifest(manifest["cases"], [])

    def _write_manifest(self, cases: dict[str, Entry], overwriting: Sequence[str]) -> None:
        known = {"train_cases": [case for case in self.about.get("train_cases", ()) if case in cases]}
        state = {"settings": self.settings, "cases": cases, "overwriting": list(overwriting)}
        manifest = {**self.about, **known, **state}
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def _state(self) -> OutputState:
        manifest = read(self.path)
        return OutputState(
            manifest.get("cases", {}),
            manifest.get("overwriting", []),
            differences(manifest["settings"], self.settings) if manifest else [],
            self._existing(manifest),
            self._is_shared(),
        )

    def _is_shared(self) -> bool:
        """Whether another process works here; removes the locks of processes that have ended."""
        alive = False
        for path in self._claims.glob("*.process"):
            lock = FileLock(path)
            if acquired(lock):
                lock.release()
                path.unlink(missing_ok=True)
            else:
                alive = True
        return alive


def acquired(lock: FileLock) -> bool:
    """Take a lock if it is free."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True
