"""An output folder: which cases are done, whether new predictions fit beside old ones, and who works there.

Its manifest says which networks and settings made the predictions. A process that works in it holds a file
lock, which the operating system releases when the process ends, even if it is killed.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from filelock import FileLock

from medconv.data.case import Case
from medconv.inference.manifest import MANIFEST, Entry, OutputState, differences, entry, read
from medconv.utils.atomic_io import write_text
from medconv.utils.errors import ArgumentError
from medconv.utils.locks import Claims, held
from medconv.utils.logging import some

TABLE = "predictions.csv"  # in a folder of answers that are no images


class Claim(NamedTuple):
    """A case that this process alone predicts.

    Args:
        release: to be called when the case is done or has failed.
    """

    case: Case
    release: Callable[[], None]


class ReplaceableResultsError(ArgumentError):
    """The output folder holds other results, which `overwrite` would replace.

    Args:
        folder: the output folder.
        conflict: what it holds.
    """

    def __init__(self, folder: Path, conflict: str) -> None:
        super().__init__(
            "output", f" {folder}: {conflict}; take another folder, or overwrite=True to replace them"
        )
        self.folder = folder
        self.conflict = conflict


class Output(ABC):
    """Where predictions go.

    Args:
        path: the folder.
        settings: what determines the predictions, by name; they are the same for all of a folder.
        about: what else the manifest says; of `train_cases`, those that are cases of the folder.

    Attributes:
        result_name: what the folder holds, for messages.
        earlier: when the predictions were made that are not made now, for messages.
        skipped: cases that `claims` did not give, since they are done.
        claimed_by_others: cases that `claims` did not give, since other processes work on them.
        logit_folder: `write` takes scores that keep all logits of a case in a file there; None: not needed.
    """

    result_name: ClassVar[str]
    earlier: ClassVar[str] = "before"

    def __init__(self, path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)
        # As the manifest gives them back: tuples become lists.
        self.settings = json.loads(json.dumps(settings))
        self.skipped: list[str] = []
        self.claimed_by_others: list[str] = []
        self.logit_folder: Path | None = None
        self._entries: dict[str, Entry] = {}  # of the cases to predict, when the prediction began
        self._lock = FileLock(path / ".lock")
        self._claims = Claims(path / ".claims")

    @property
    def target(self) -> Path:
        """The file or folder with the predictions."""
        return self.path

    @abstractmethod
    def claims(self, cases: Sequence[Case]) -> Iterator[Claim]:
        """Cases to predict, one after the other."""

    @abstractmethod
    def write(self, predictor: Any, case: Case, scores: Any) -> None:
        """Write a case's prediction, from what `predictor.scores` gave.

        Files beside it come first, so that a case with a prediction is done.
        Raises:
            OSError: the disk is full, or no permission.
        """

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """Register this process as working here, until the context ends.

        Args:
            overwrite: results of `cases` that the manifest lists are removed.
        Raises:
            ArgumentError: it holds other results, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with held(self._lock):
                self._entries = {case.id: entry(case.images) for case in cases}
                self._begin(self._entries, overwrite)
        # NotImplementedError: a file system without locks.
        except (OSError, NotImplementedError) as error:
            cause = getattr(error, "strerror", None) or error
            raise self._refusal(f"cannot be written ({cause})") from error
        completed = False
        try:
            yield
            completed = True
        finally:
            with held(self._lock):
                self._end(completed)

    def check_unchanged(self, case: Case) -> None:
        """Check that a case's images are those of the beginning: its result gets the grid of the file now.

        Raises: ValueError: one was replaced or removed since `open`.
        """
        stamps = entry(case.images)["stamps"]
        for path, before, now in zip(case.images, self._entries[case.id]["stamps"], stamps, strict=True):
            if now != before:
                raise ValueError(f"{path}: was replaced or removed while it was predicted; predict it again")

    @abstractmethod
    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        """Cases with a prediction. Raises: ValueError: predictions of another kind are here."""

    @abstractmethod
    def _clean(self, replaced: Sequence[str]) -> None:
        """Remove what killed processes left, and the predictions of these cases."""

    def _prediction_name(self, case_id: str) -> str:
        """A case's prediction, for messages."""
        return case_id

    def _begin(self, cases: dict[str, Entry], overwrite: bool) -> None:
        state = self._state()
        renewed = state.renewed(cases)
        replaced = [case_id for case_id in cases if case_id not in renewed] if overwrite else []
        self._check(state, cases, overwrite, replaced)
        if not state.busy:
            self._clean(replaced)
        # Entries of results made with other settings would make these count as done.
        previous = {} if state.differences else state.listed
        self._write_manifest({**previous, **cases}, sorted({*renewed, *replaced}))
        self._claims.join()

    def _check(
        self, state: OutputState, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]
    ) -> None:
        """Raises: ArgumentError: existing results do not fit beside new ones, and must not be replaced."""
        unlisted = [case_id for case_id in state.existing if case_id not in state.listed]
        if unlisted:
            raise self._refusal(
                f"holds {self.result_name} that {MANIFEST} does not list, such as "
                f"{self._prediction_name(unlisted[0])}; take another folder, or remove them"
            )
        conflict = state.conflict(cases, replaced)
        if conflict and state.busy:
            raise self._refusal(f"{conflict}; another process is writing there")
        if conflict and not overwrite:
            raise ReplaceableResultsError(self.path, conflict)
        kept = [case_id for case_id in state.existing if case_id not in cases]
        if state.differences and kept:
            raise self._refusal(
                "to overwrite would keep results made with other settings, of cases that are not in the "
                f"input: {some(kept)}; take another folder"
            )

    def _refusal(self, reason: str) -> ArgumentError:
        return ArgumentError("output", f" {self.path}: {reason}")

    def _end(self, completed: bool) -> None:
        """Leave the folder; the last process that completed all its cases ends an unfinished overwrite.

        Args:
            completed: this process did all its cases.
        """
        if not self._claims.leave():
            return
        manifest = read(self.path) if completed else {}
        if manifest.get("overwriting"):
            # A full disk: all cases are done nevertheless.
            with suppress(OSError):
                self._write_manifest(manifest["cases"], [])

    def _write_manifest(self, cases: dict[str, Entry], overwriting: Sequence[str]) -> None:
        train_cases = [case_id for case_id in self.about.get("train_cases", ()) if case_id in cases]
        manifest = {
            **self.about,
            "train_cases": train_cases,
            "settings": self.settings,
            "cases": cases,
            "overwriting": list(overwriting),
        }
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def _state(self) -> OutputState:
        manifest = read(self.path)
        return OutputState(
            listed=manifest.get("cases", {}),
            overwriting=manifest.get("overwriting", []),
            differences=differences(manifest["settings"], self.settings) if manifest else [],
            existing=self._existing(manifest),
            busy=self._claims.is_shared(),
        )
