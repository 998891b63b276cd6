"""What goes wrong inside loader workers, brought to the main process: whose case it is, and where it came from.

torch raises a worker's error anew from its text alone, traceback and all, which is no message for a user. So an error
travels as a value in the place of its batch.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

_DEAD = re.compile(r"DataLoader worker \(pid\S* ([\d, ]+)\) (?:is killed by signal: ([^.]+)\.|exited unexpectedly)")


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
            said = f"no memory left in a loader worker ({error}); fewer data.num_workers or smaller batches help"
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

    Args: dataset: with `describe(index)`, which gives the case, and what is read of it in words.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self.dataset[index]
        except Exception as error:
            return index, Fault.of(error, *self.dataset.describe(index))


class GuardedCollate:
    """Items of a `Guarded` dataset to one batch, or to the `Fault` of the first item that has or makes one."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, items: list[tuple[int, Any]]) -> Any:
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


def ended_worker(error: BaseException) -> tuple[str, str] | None:
    """Process id and signal of the dead worker that torch speaks of; None: another error.

    torch's handler of the signal may raise at any line of the main process, and what waits for a batch raises it anew.
    """
    if not isinstance(error, RuntimeError) or (found := _DEAD.search(str(error))) is None:
        return None
    cause = error.__cause__ or error.__context__
    known = ended_worker(cause) if found[2] is None and cause is not None else None
    return known or (found[1], found[2] or "Killed")


def advice(pid: str, ended_by: str, settings: Mapping[str, Any]) -> str | None:
    """What helps where the system ended a worker; None: a crash. Args: settings: the values of `data`."""
    keys = ("num_workers", "prefetch_factor", "batch_size", "patch_size")
    less = "fewer or smaller " + ", ".join(f"data.{key} (now {settings[key]})" for key in keys)
    if ended_by == "Killed":
        return f"loader worker {pid} was killed, most likely because memory ran out. What helps: {less}; or more memory"
    if ended_by == "Bus error":
        return (
            f"loader worker {pid} ended with a bus error: shared memory, through which batches travel, is full, or a "
            f"prepared file was cut while it was read. What helps: a larger /dev/shm (`docker run --shm-size=8g`); {less}"
        )
    return None
