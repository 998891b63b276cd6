"""Errors about memory and killed loader workers, with advice on what helps."""

from collections.abc import Iterator
from contextlib import contextmanager

from medconv.config import DataConfig
from medconv.data.loading import worker_errors
from medconv.utils.errors import first_line
from medconv.utils.hardware import memory_advice
from medconv.utils.signals import RunInterrupted


@contextmanager
def naming_memory(data: DataConfig) -> Iterator[None]:
    """Around training.

    Args:
        data: the config's `data`, which the advice refers to.
    Raises:
        ValueError: memory ran out, or a worker was killed.
        RunInterrupted: a worker got SIGTERM, as all processes of a preempted job do.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        ended = worker_errors.ended_worker(error)
        if ended is not None:
            pid, ended_by = ended
            if ended_by == "SIGTERM":
                raise RunInterrupted from error
            raise ValueError(worker_errors.advice(pid, ended_by, data)) from error
        advice = memory_advice(error)
        if advice is not None:
            raise ValueError(f"{advice} ({first_line(error)})") from error
        raise
