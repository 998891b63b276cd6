"""Running out of memory, and loader workers that a signal ends, in words about what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from medconv.data.loading import worker_errors
from medconv.utils.hardware import memory_advice


@contextmanager
def naming_memory(data: Mapping[str, Any]) -> Iterator[None]:
    """Around training. Args: data: the values of the config's `data`, which the words refer to.

    Raises: ValueError: memory ran out, or a worker was ended; SIGTERMException: a worker was told to stop, as
        all processes of a preempted job are.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (ended := worker_errors.ended_worker(error)) is not None:
            if ended[1] == "SIGTERM":
                raise SIGTERMException from error
            raise ValueError(worker_errors.advice(*ended, data)) from error
        if (words := memory_advice(error)) is not None:
            said = str(error).strip() or type(error).__name__
            raise ValueError(f"{words} ({said.splitlines()[0]})") from error
        raise
