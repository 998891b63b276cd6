"""The output folder of a segmentation: which cases are done, and which another process works on.

A case is done once its label map exists and the folder's manifest says that the same networks and settings
made it. A process that works on a case holds a file lock, which the operating system releases when the
process ends, even if it is killed.
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
from medconv.inference.manifest import MANIFEST, Entry, OutputState, differences, entry, read
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some

PROBABILITIES = "probabilities"
DICOM_SEG = "dicomseg"
_VOLUME, _PICTURE = ".nii.gz", ".png"
_PARTIAL = re.compile(r"\.\d+\..*")  # a temporary file of `atomic_io.replacing`, left by a killed process


class OutputDir:
    """Where label maps go.

    Args:
        settings: what determines the results, by name; they are the same for all results of a folder.
        about: what else the manifest says.
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
        self.path, self.about = path, dict(about)
        self.writes_probabilities, self.writes_dicom_seg = probabilities, dicom_seg
        extra = {"dicom_seg": True} if dicom_seg else {}
        self.settings = json.loads(json.dumps({**settings, "probabilities": probabilities, **extra}))
        self._ending = _VOLUME  # of label maps; `open` chooses it by the cases
        self.skipped: list[str] = []
        self.claimed_by_others: list[str] = []
        self._claims, self._lock = path / ".claims", FileLock(path / ".lock")
        self._process_lock = FileLock(
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
        """Register this process as working here, until the context ends. Label maps are PNG files if all
        images are pictures (PNG, JPEG and the like).

        Raises: ValueError: it holds other results (`overwrite` removes those of `cases` that the manifest
            lists); it holds the images themselves; or it cannot be written.
        """
        self._ending = (
            _PICTURE if all(is_picture(path) for case in cases for path in case.images) else _VOLUME
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_apart(cases)
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

    def claims(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Callable[[], None]]]:
        """Cases to predict, one after the other, each with a function to call when it is done or has failed.

        Cases that another process works on are tried again at the end, and then skipped.
        """
        postponed: list[Case] = []
        for is_second_pass, remaining in ((False, cases), (True, postponed)):
            for case in remaining:
                lock = FileLock(self._claims / f"{case.id}.lock", thread_local=False)
                if self._claimed(case, lock):
                    yield case, lock.release
                elif self.label(case.id).exists():
                    self.skipped.append(case.id)
                elif is_second_pass:
                    self.claimed_by_others.append(case.id)
                else:
                    postponed.append(case)

    def _claimed(self, case: Case, lock: FileLock) -> bool:
        """Whether this process now holds the case's lock, and the case is not done."""
        if self.label(case.id).exists() or not _acquired(lock):
            return False
        if self.label(case.id).exists():  # written by another process in between
            lock.release()
            return False
        return True

    def _check_apart(self, cases: Sequence[Case]) -> None:
        """Raises: ValueError: results would be written into a folder of images. Folders are compared by
        identity, not by path, since links give one folder several paths."""
        outputs = {
            _identity(self.path),
            *(_identity(self.path / name) for name in (PROBABILITIES, DICOM_SEG)),
        } - {None}
        for path in (path for case in cases for path in case.images):
            if outputs & _folders_of(path):
                raise ValueError(
                    f"--output {self.path}: holds the images themselves, such as {path}; take another folder"
                )

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
                f"holds label maps that {MANIFEST} does not list, such as {unlisted[0]}{self._ending}; take "
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
        manifest = {**self.about, "settings": self.settings, "cases": cases, "overwriting": list(overwriting)}
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def _state(self) -> OutputState:
        manifest = read(self.path)
        names = sorted(
            p.name.removesuffix(self._ending) for p in self.path.glob(f"*{self._ending}") if p.name[0] != "."
        )
        return OutputState(
            manifest.get("cases", {}),
            manifest.get("overwriting", []),
            differences(manifest["settings"], self.settings) if manifest else [],
            names,
            self._is_shared(),
        )

    def _is_shared(self) -> bool:
        """Whether another process works here; removes the locks of processes that have ended."""
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


def _folders_of(image: Path) -> set[tuple[int, int] | None]:
    """Identities of the folder in the path, of the real folder if the path is a link, and of the path itself,
    which is a folder for a DICOM series.
    """
    try:
        return {_identity(image.parent), _identity(Path(os.path.realpath(image)).parent), _identity(image)}
    except ValueError:  # not a possible file name; such a case fails when it is read
        return set()


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode, which are the same for all paths of a folder; None: it does not exist."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
