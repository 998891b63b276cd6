"""The folder of predictions: what made them, which are done, and which another process has in hand.

A case is done once its label map has its name, and the folder's record says that the same networks and
settings made it. Who works on a case holds a lock on a file, which the system lets go when its process ends,
in whatever way.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medconv.data.case import Case
from medconv.data.io.raster import is_picture
from medconv.inference.manifest import RECORD, Entry, Found, differences, entry, read
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some

PROBABILITIES = "probabilities"
DICOM_SEG = "dicomseg"
_VOLUME, _PICTURE = ".nii.gz", ".png"
_PARTIAL = re.compile(r"\.\d+\..*")  # what `atomic.replacing` leaves of a killed process


class Folder:
    """Where predictions go.

    Args:
        settings: what decides the results, by name; a folder has one set of them.
        about: what else its record says.
        probabilities, dicom_seg: whether they are written, too.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        about: Mapping[str, Any],
        probabilities: bool = False,
        dicom_seg: bool = False,
    ) -> None:
        self.path, self.about, self.writes_probabilities, self.writes_dicom_seg = (
            path,
            dict(about),
            probabilities,
            dicom_seg,
        )
        also = {"dicom_seg": True} if dicom_seg else {}  # records from before it was there have none
        self.settings = json.loads(json.dumps({**settings, "probabilities": probabilities, **also}))
        self._ending = _VOLUME  # of label maps, until the cases are known
        self.skipped: list[str] = []
        self.elsewhere: list[str] = []
        self._claims, self._lock = path / ".claims", FileLock(path / ".lock")
        self._mine = FileLock(
            self._claims / f"{socket.gethostname()}-{os.getpid()}-{id(self)}.process", thread_local=False
        )

    def label(self, case: str) -> Path:
        return self.path / f"{case}{self._ending}"

    def probabilities(self, case: str) -> Path:
        return self.path / PROBABILITIES / f"{case}{_VOLUME}"

    def dicom_seg(self, case: str) -> Path:
        return self.path / DICOM_SEG / f"{case}.dcm"

    @contextmanager
    def open(self, cases: Sequence[Case], overwrite: bool = False) -> Iterator[None]:
        """Inside, this process is one of those that work here. Label maps are PNG where all images are
        pictures.

        Raises: ValueError: it holds other results, which `overwrite` removes as far as they belong to `cases`
            and the record accounts for them; it is where the images are; or it cannot be written.
        """
        self._ending = (
            _PICTURE if all(is_picture(path) for case in cases for path in case.images) else _VOLUME
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_apart(cases)
            with self._lock:
                self._begin({case.id: entry(case.images) for case in cases}, overwrite)
        except (OSError, NotImplementedError) as error:  # the latter: no locks there
            raise ValueError(f"--output {self.path}: cannot be written ({_reason(error)})") from error
        whole = False
        try:
            yield
            whole = True
        finally:
            with self._lock:
                self._end(whole)

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

    def _check_apart(self, cases: Sequence[Case]) -> None:
        """Raises: ValueError: results would come to lie among the images; folders are told apart by what they
        are, not by how they are called."""
        ours = {
            _identity(self.path),
            *(_identity(self.path / name) for name in (PROBABILITIES, DICOM_SEG)),
        } - {None}
        for path in (path for case in cases for path in case.images):
            if ours & _homes(path):
                raise ValueError(
                    f"--output {self.path}: holds the images themselves, such as {path}; take another folder"
                )

    def _begin(self, cases: dict[str, Entry], overwrite: bool) -> None:
        found = self._found()
        renewed = found.renewed(cases)
        replaced = [case for case in cases if case not in renewed] if overwrite else []
        self._check(found, cases, overwrite, replaced)
        self._claims.mkdir(exist_ok=True)
        if not found.busy:
            self._clean(replaced)
        kept = {} if found.differences else found.before
        self._write_record({**kept, **cases}, sorted({*renewed, *replaced}))
        self._mine.acquire()

    def _check(self, found: Found, cases: dict[str, Entry], overwrite: bool, replaced: Sequence[str]) -> None:
        """Raises: ValueError: what is here cannot stay beside new results, nor be replaced."""
        if unknown := [case for case in found.there if case not in found.before]:
            raise self._refusal(
                f"holds label maps that no {RECORD} accounts for, such as {unknown[0]}{self._ending}; take "
                "another folder, or remove them"
            )
        fault = found.fault(cases, replaced)
        if fault and (found.busy or not overwrite):
            advice = (
                "another process is at work there"
                if found.busy
                else "take another folder, or --overwrite to replace them"
            )
            raise self._refusal(f"{fault}; {advice}")
        if found.differences and (strangers := [case for case in found.there if case not in cases]):
            raise self._refusal(
                "--overwrite would leave results there that were made otherwise, of cases that --input "
                f"does not name: {some(strangers)}; take another folder"
            )

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"--output {self.path}: {reason}")

    def _end(self, whole: bool) -> None:
        """Args: whole: this process came to its end, so that if it was the last one nothing is left to be
        replaced.
        """
        self._mine.release()
        Path(self._mine.lock_file).unlink(missing_ok=True)
        if not self._others():
            shutil.rmtree(self._claims, ignore_errors=True)
            known = read(self.path) if whole else {}
            if known.get("overwriting"):
                with suppress(OSError):  # no room: all is done none the less
                    self._write_record(known["cases"], [])

    def _write_record(self, cases: dict[str, Entry], overwriting: Sequence[str]) -> None:
        record = {**self.about, "settings": self.settings, "cases": cases, "overwriting": list(overwriting)}
        write_text(self.path / RECORD, json.dumps(record, indent=2) + "\n")

    def _found(self) -> Found:
        known = read(self.path)
        names = sorted(
            p.name.removesuffix(self._ending) for p in self.path.glob(f"*{self._ending}") if p.name[0] != "."
        )
        return Found(
            known.get("cases", {}),
            known.get("overwriting", []),
            differences(known["settings"], self.settings) if known else [],
            names,
            self._others(),
        )

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
        kinds = {"": self._ending, PROBABILITIES: _VOLUME, DICOM_SEG: ".dcm"}
        for path in [
            path for name, ending in kinds.items() for path in (self.path / name).glob(f".*{ending}")
        ]:
            if _PARTIAL.fullmatch(path.name):
                path.unlink()
        for case in replaced:
            self.label(case).unlink(missing_ok=True)
            self.probabilities(case).unlink(missing_ok=True)
            self.dicom_seg(case).unlink(missing_ok=True)


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def _homes(image: Path) -> set[tuple[int, int] | None]:
    """The folder that a path names, and the one that its file lies in, should it be a link; of a series,
    itself as well.
    """
    try:
        return {_identity(image.parent), _identity(Path(os.path.realpath(image)).parent), _identity(image)}
    except ValueError:  # no possible name; such a case fails when it is read
        return set()


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from all others, in whatever way it is called; None: it is not there."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
