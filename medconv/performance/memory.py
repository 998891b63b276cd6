"""Running out of memory, in this process or in a loader worker, in words about what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from medconv.data import faults
from medconv.performance.hardware import memory_advice


@contextmanager
def naming_memory(data: Mapping[str, Any]) -> Iterator[None]:
    """Around training. Args: data: the values of the config's `data`, which the words refer to.

    Raises: ValueError: memory ran out; SIGTERMException: a worker was told to stop, as all processes of a preempted job are.
    """
    try:
        yield
    except RuntimeError as error:
        pid, ended_by = faults.ended_worker(error) or ("", "")
        if ended_by == "Terminated":
            raise SIGTERMException from error
        if (words := faults.advice(pid, ended_by, data)) is not None:
            raise ValueError(words) from error
        if (words := memory_advice(error)) is not None:
            raise ValueError(f"{words} ({str(error).strip().splitlines()[0]})") from error
        raise
