"""Errors in loader workers, reported in the main process with their case.

torch re-raises a worker's error with its whole traceback as the message. Instead, an error is sent as a value
in place of the batch. A worker killed by a signal sends nothing; its current task is in shared memory.
"""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset, get_worker_info

from medconv.utils.atomic_io import TOO_MANY_FILES
from medconv.utils.errors import first_line, with_class
from medconv.utils.hardware import out_of_memory

_DEAD = re.compile(
    r"DataLoader worker \(pid\S* ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.|exited unexpectedly)"
)
_SHARED_MEMORY = re.compile(r"shared memory|/torch_\d+")  # in torch's errors
_ERRNO = re.compile(r"\((\d+)\)")  # such as `<...>: Too many open files (24)`
_NAMES = {signal.strsignal(number): number.name for number in signal.Signals}
WAITING, READING, AUGMENTING = range(3)
_GUARDED: WeakSet[GuardedDataset] = WeakSet()  # of this process


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text: the cause of the error that the main process raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class SharedMemoryFullError(ValueError):
    """Batches travel from workers to the main process through shared memory, and it is full."""


@dataclass(frozen=True)
class WorkerError:
    """An error in a worker, as text, because not every exception can be pickled."""

    message: str
    is_users: bool  # whether it is the user's error, like every ValueError, or a bug
    traceback: str
    kind: type[Exception] = ValueError  # of users' errors

    @classmethod
    def unsent(cls, error: Exception) -> WorkerError:
        """The error of a batch that cannot be sent to the main process."""
        text = "".join(traceback.format_exception(error))
        lacks_files = too_many_files(error)
        if _SHARED_MEMORY.search(str(error)) and not lacks_files:
            message = f"no shared memory left for a batch ({first_line(error)})"
            return cls(message, True, text, SharedMemoryFullError)
        advice = "; `ulimit -n 65536` permits more open files" if lacks_files else ""
        message = f"a loader worker cannot send its batch: {with_class(error)}{advice}"
        return cls(message, lacks_files, text)

    @classmethod
    def lost(cls, error: Exception) -> WorkerError:
        """The error of a batch whose connection ended, though its worker lives, which knows the reason."""
        message = (
            f"a loader worker did not hand over its batch ({with_class(error)}), most likely because it has "
            "too many open files; fewer loader workers or `ulimit -n 65536` help"
        )
        return cls(message, True, "".join(traceback.format_exception(error)))

    @classmethod
    def of(cls, error: Exception, case: str, sample: str) -> WorkerError:
        if _SHARED_MEMORY.search(str(error)):
            return cls.unsent(error)
        is_users = isinstance(error, ValueError)
        message = f"{type(error).__name__}: {error}"
        if is_users:
            message = str(error).removeprefix(f"case {case}: ")
        if out_of_memory(error):
            is_users = True
            message = (
                f"no memory left in a loader worker ({error}); fewer loader workers or smaller batches help"
            )
        return cls(
            message=f"case {case} ({sample}): {message}",
            is_users=is_users,
            traceback="".join(traceback.format_exception(error)),
        )

    def error(self) -> Exception:
        """The exception to raise in the main process."""
        error = self.kind(self.message) if self.is_users else RuntimeError(self.message)
        error.__cause__ = WorkerTraceback(self.traceback)
        return error


def too_many_files(error: BaseException | None) -> bool:
    """Whether this error or one in its context has that number, which torch writes into a text."""
    while error is not None:
        numbers = _ERRNO.findall(first_line(error)) if _SHARED_MEMORY.search(str(error)) else []
        if (
            getattr(error, "errno", None) in TOO_MANY_FILES
            or int(numbers[-1] if numbers else 0) in TOO_MANY_FILES
        ):
            return True
        error = error.__context__
    return False


class GuardedDataset(Dataset[Any]):
    """A dataset with items (index, item), or (index, WorkerError) if the item cannot be read.

    Args:
        dataset: has `describe(index)`, which returns the case and a description.
        workers: their number.
    """

    def __init__(self, dataset: Any, workers: int) -> None:
        self.dataset = dataset
        # A row per worker: process id, then the arguments of `note`
        self._at_work = torch.full((workers, 4), -1).share_memory_()
        self.processes: Sequence[Any] = ()
        _GUARDED.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "processes": ()}

    def note(self, doing: int, indices: Sequence[int] = (-1,)) -> None:
        """Called in a worker before each task.

        Args:
            doing: one of the constants.
            indices: of the items; the first and last are stored.
        """
        worker = get_worker_info()
        if worker is not None:
            self._at_work[worker.id] = torch.tensor([os.getpid(), doing, indices[0], indices[-1]])

    def at_work(self, pid: int) -> str | None:
        """What a worker was doing, in words; None if it belongs to another dataset."""
        for process, doing, first, last in self._at_work.tolist():
            if process != pid:
                continue
            if doing == WAITING:
                return "while it waited"
            task = "reading" if doing == READING else "augmenting"
            samples = [self.dataset.describe(index) for index in range(first, last + 1)]
            names = ", ".join(f"case {case} ({sample})" for case, sample in samples)
            return f"while {task} {names}"
        return None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        self.note(READING, [index])
        try:
            return index, self.dataset[index]
        except Exception as error:
            return index, WorkerError.of(error, *self.dataset.describe(index))


@dataclass(frozen=True)
class GuardedCollate:
    """Items of a `GuardedDataset` to a batch, or to the `WorkerError` of the first failing item."""

    collate: Callable[[list[Any]], Any]
    guarded: GuardedDataset

    def __call__(self, items: list[tuple[int, Any]]) -> Any:
        self.guarded.note(AUGMENTING, [index for index, _ in items])
        batch: Any = next((item for _, item in items if isinstance(item, WorkerError)), None)
        if batch is None:
            try:
                batch = self.collate([item for _, item in items])
            except Exception as error:
                batch = self._find_culprit(items, error)
        self.guarded.note(WAITING)
        return batch

    def _find_culprit(self, items: list[tuple[int, Any]], error: Exception) -> WorkerError:
        """Collate each item alone to find the failing one; the first item if none fails alone."""
        for index, item in items:
            try:
                self.collate([item])
            except Exception as item_error:
                return WorkerError.of(item_error, *self.guarded.dataset.describe(index))
        return WorkerError.of(error, *self.guarded.dataset.describe(items[0][0]))


def ended_worker(error: BaseException) -> tuple[int, str] | None:
    """Process id of the dead worker in torch's error, and its signal or exit code; None: another error.

    torch's signal handler may raise at any line of the main process, and the loader may raise it again. If
    several workers ended, the first counts: torch itself ends the others.
    """
    cause = error.__cause__ or error.__context__
    earlier = ended_worker(cause) if cause is not None else None
    if earlier is not None:
        return earlier
    match = _DEAD.search(str(error))
    if match is None or not isinstance(error, RuntimeError):
        return None
    pids, signal_text = match.groups()
    pid = int(pids.split(",")[0])
    if signal_text:
        return pid, _NAMES.get(signal_text, signal_text)
    return pid, _exit(pid)


def _exit(pid: int) -> str:
    """How a process ended, if torch does not report it."""
    workers = [worker for guarded in _GUARDED for worker in guarded.processes if worker.pid == pid]
    exit_codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
    exit_code = exit_codes[0] if exit_codes else -signal.SIGKILL
    if exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"


def description(pid: int, ended_by: str) -> str:
    """The worker, its end and its task, in words."""
    return _with_task(pid, f"was ended by {ended_by}")


def doing(pid: int) -> str:
    """The worker, its state and its task, in words."""
    state = ""
    with suppress(OSError):  # other systems have no /proc
        # After the name in parentheses, which may hold spaces
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    words = {
        "T": f"is stopped (`kill -CONT {pid}` lets it go on)",
        "D": "waits for a disk or network file system",
    }
    return _with_task(pid, words.get(state, "has not sent it"))


def _with_task(pid: int, words: str) -> str:
    tasks = [guarded.at_work(pid) for guarded in _GUARDED]
    # It has one task
    return " ".join([f"loader worker {pid} {words}", *filter(None, tasks)][:2])
