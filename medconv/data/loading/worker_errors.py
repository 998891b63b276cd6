"""What goes wrong inside loader workers, brought to the main process: whose case it is, and where it came
from.

torch raises a worker's error anew from its text alone, traceback and all, which is no message for a user. So
an error travels as a value in the place of its batch. Of a worker that a signal ends nothing travels; what it
was at work on stands in memory that it shared.
"""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset, get_worker_info

_DEAD = re.compile(
    r"DataLoader worker \(pid\S* ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.|exited unexpectedly)"
)


_NAMES = {signal.strsignal(number): number.name for number in signal.Signals}
WAITING, READING, AUGMENTING = range(3)
_GUARDED: WeakSet[Guarded] = WeakSet()  # of this process


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text: the cause of the error that the main process raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Fault:
    """An error in a worker; plain text, as not every exception survives the way between processes."""

    message: str
    users: bool  # whose fault: the user's, as of every ValueError, or ours
    traceback: str

    @classmethod
    def of(cls, error: Exception, case: str, sample: str) -> Fault:
        users = isinstance(error, ValueError)
        said = str(error).removeprefix(f"case {case}: ") if users else f"{type(error).__name__}: {error}"
        # numpy's way to say so, and torch's
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
            said = (
                f"no memory left in a loader worker ({error}); fewer data.num_workers or smaller batches help"
            )
            users = True
        text = "".join(traceback.format_exception(error))
        return cls(f"case {case} ({sample}): {said}", users, text)

    def error(self) -> Exception:
        """What to raise in the main process."""
        found = ValueError(self.message) if self.users else RuntimeError(self.message)
        found.__cause__ = WorkerTraceback(self.traceback)
        return found


class Guarded(Dataset):
    """A dataset whose items come as (index, item), or (index, Fault) in the place of an error.

    Args: dataset: with `describe(index)`, which gives the case, and what is read of it in words. workers: how
        many there will be.
    """

    def __init__(self, dataset: Any, workers: int = 0) -> None:
        self.dataset = dataset
        self._at_work = torch.full(
            (workers, 4), -1
        ).share_memory_()  # a worker's own row: process id, then as in `note`
        self.processes: Sequence[Any] = ()
        _GUARDED.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "processes": ()}

    def note(self, doing: int, indices: Sequence[int] = (-1,)) -> None:
        """In a worker: what it begins to do. Args: doing: one of the constants. indices: first and last
        count.
        """
        if (worker := get_worker_info()) is not None:
            self._at_work[worker.id] = torch.tensor([os.getpid(), doing, indices[0], indices[-1]])

    def at_work(self, pid: int) -> str | None:
        """What a worker was doing, in words; None: it is none of this dataset's."""
        for process, doing, first, last in self._at_work.tolist():
            if process == pid and doing != WAITING:
                described = [self.dataset.describe(index) for index in range(first, last + 1)]
                what = "reading" if doing == READING else "augmenting"
                return f"while {what} " + ", ".join(f"case {case} ({words})" for case, words in described)
            if process == pid:
                return "while it waited"
        return None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        self.note(READING, [index])
        try:
            return index, self.dataset[index]
        except Exception as error:
            return index, Fault.of(error, *self.dataset.describe(index))


class GuardedCollate:
    """Items of a `Guarded` dataset to one batch, or to the `Fault` of the first item that has or makes
    one.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], guarded: Guarded) -> None:
        self.collate, self.guarded, self.dataset = collate, guarded, guarded.dataset

    def __call__(self, items: list[tuple[int, Any]]) -> Any:
        self.guarded.note(AUGMENTING, [index for index, _ in items])
        batch = self._collated(items)
        self.guarded.note(WAITING)
        return batch

    def _collated(self, items: list[tuple[int, Any]]) -> Any:
        for _, item in items:
            if isinstance(item, Fault):
                return item
        try:
            return self.collate([item for _, item in items])
        except Exception as error:
            return self._blamed(items, error)

    def _blamed(self, items: list[tuple[int, Any]], error: Exception) -> Fault:
        """Each item is tried alone, to find whose fault it is; the first item's where none fails alone."""
        for index, item in items:
            try:
                self.collate([item])
            except Exception as own:
                return Fault.of(own, *self.dataset.describe(index))
        return Fault.of(error, *self.dataset.describe(items[0][0]))


def ended_worker(error: BaseException) -> tuple[int, str] | None:
    """Process id of the dead worker that torch speaks of, and its signal, or its exit code; None: another
    error.

    torch's handler of the signal may raise at any line of the main process, and what waits for a batch raises
    it anew. Of
    several the first counts: torch itself ends the other workers then.
    """
    cause = error.__cause__ or error.__context__
    if cause is not None and (known := ended_worker(cause)) is not None:
        return known
    if not isinstance(error, RuntimeError) or (found := _DEAD.search(str(error))) is None:
        return None
    pid = int(found[1].split(",")[0])
    return pid, _NAMES.get(found[2], found[2]) if found[2] else _exit(pid)


def _exit(pid: int) -> str:
    """How a process ended, where torch does not say it."""
    codes = [worker.exitcode for guarded in _GUARDED for worker in guarded.processes if worker.pid == pid]
    code = next((code for code in codes if code is not None), -signal.SIGKILL)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def advice(pid: int, ended_by: str, settings: Mapping[str, Any]) -> str:
    """Which worker ended how, over what, and what helps. Args: settings: the values of `data`."""
    keys = ("num_workers", "prefetch_factor", "batch_size", "patch_size")
    less = "fewer or smaller " + ", ".join(f"data.{key} (now {settings[key]})" for key in keys)
    doing = next((words for guarded in _GUARDED if (words := guarded.at_work(pid))), None)
    ended = f"loader worker {pid} was ended by {ended_by}{f' {doing}' if doing else ''}"
    if ended_by == "SIGKILL":
        return f"{ended}, most likely because memory ran out. What helps: {less}; or more memory"
    if ended_by == "SIGBUS":
        return (
            f"{ended}: shared memory, through which batches travel, is full, or a "
            "prepared file was cut while it was read. What helps: a larger /dev/shm (`docker run "
            f"--shm-size=8g`); {less}"
        )
    return (
        f"{ended}: a library crashed, not Python. Look at this case: `medconv preprocess` with --verify "
        "reads its prepared files again; `python -X faulthandler -m medconv.cli train` with "
        "data.num_workers=0 shows the line"
    )
