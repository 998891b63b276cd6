"""Trainings of the recipe benchmark as processes: their settings, cores, results and errors."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.peers import training
from benchmarks.peers.process import importable
from benchmarks.results import Row
from medconv.utils.atomic_io import write_text

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS",
)
KEPT_LINES = 8  # of what a contestant printed, for a message
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One training of one contestant.

    Args: command: starts its three parts. settings: a result is valid for these only.
    """

    name: str
    command: tuple[str, ...]
    job: training.Job
    settings: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.job.folder)

    def result(self) -> Row | None:
        """The earlier result, if any. Raises: ValueError: it was made with other settings."""
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        result: Row = json.loads(path.read_text())
        made = result["settings"]
        other = [key for key in sorted({*made, *self.settings}) if made.get(key) != self.settings.get(key)]
        if other:
            differences = ", ".join(
                f"{key}: {made.get(key)}, asked for now: {self.settings.get(key)}" for key in other
            )
            raise ValueError(
                f"{path} was made with other settings ({differences}); give another --output, or remove it"
            )
        return result

    def trained(self) -> bool:
        """Whether exactly this job is trained; predictions may be missing."""
        path = self.folder / training.DONE
        return path.is_file() and json.loads(path.read_text())["job"] == asdict(self.job)

    def keep(self, result: Row) -> None:
        """Write its result and delete all snapshots except the last."""
        write_text(
            self.folder / "result.json",
            json.dumps({**result, "settings": dict(self.settings)}, indent=1) + "\n",
        )
        for snapshot in self.job.snapshots[:-1]:
            Path(snapshot["file"]).unlink(missing_ok=True)


class Processes:
    """Runs parts of entries; on leaving, ends their processes and those of their loaders."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}  # an entry's folder to its error
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()

    def run(self, part: str, entries: Sequence[Entry], slots: Sequence[Sequence[int]]) -> None:
        """Run one part of all entries in parallel, each on its slot's cores; skip failed entries."""
        able = [entry for entry in entries if str(entry.folder) not in self.errors]
        with ThreadPoolExecutor(len(slots)) as pool:
            try:
                for future in [
                    pool.submit(self._run, part, e, slot) for e, slot in zip(able, slots, strict=False)
                ]:
                    future.result()
            except BaseException:  # the pool waits for its threads, and they for their processes
                self.end()
                raise

    def end(self) -> None:
        with self._lock:
            for process in self._alive:
                _kill(process)

    def _run(self, part: str, entry: Entry, cores: Sequence[int]) -> None:
        if part == "train":
            if entry.trained():
                return
            shutil.rmtree(entry.folder, ignore_errors=True)  # a training that was stopped starts again
        entry.folder.mkdir(parents=True, exist_ok=True)
        log.info("%s, %g s: %s on core %s", entry.name, entry.job.seconds, part, ", ".join(map(str, cores)))
        job, printed = entry.folder / "job.json", entry.folder / f"{part}.log"
        entry.job.write(job)
        code = self._finished([*entry.command, part, str(job)], printed, entry.job.threads, cores)
        if code:
            lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()][
                -KEPT_LINES:
            ]
            what = f"  {entry.name}, {part}: ended with code {code}; {printed} ends with"
            self.errors[str(entry.folder)] = "\n    ".join([what, *lines])
            log.error("%s", self.errors[str(entry.folder)].strip())

    def _finished(self, command: Sequence[str], printed: Path, threads: int, cores: Sequence[int]) -> int:
        """Its exit code. In a thread of its own: a process inherits the cores of the thread that starts
        it.
        """
        os.sched_setaffinity(0, cores)
        settings = {**importable(), **{name: str(threads) for name in THREADS}}
        with printed.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=settings, start_new_session=True
            )
        with self._lock:
            self._alive.add(process)
        code = process.wait()
        with self._lock:
            _kill(process)  # workers that it left behind
            self._alive.discard(process)
        return code


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
