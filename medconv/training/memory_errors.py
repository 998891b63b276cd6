"""Errors about memory and killed loader workers, with advice on what helps."""

from medconv.config import DataConfig
from medconv.data.loading import worker_errors
from medconv.utils.errors import first_line
from medconv.utils.hardware import out_of_memory
from medconv.utils.signals import RunInterrupted

# What training raises if memory runs out or a worker ends, and for other reasons.
ERRORS = (RuntimeError, MemoryError, worker_errors.SharedMemoryFullError)
_STEP_ADVICE = (
    "the step does not fit into memory. Options, measured on a 3D U-Net: "
    "perf.activation_checkpointing=pointwise (64 % of the activations kept, 12 % slower), "
    "perf.activation_checkpointing=blocks (41 %, 25 % slower), data.batch_size halved with "
    "trainer.accumulate_grad_batches doubled (half of them), a smaller data.patch_size; in a "
    "validation, task.sw_batch_size=1"
)


def raise_advice(error: Exception, data: DataConfig) -> None:
    """Raise an error with advice in place of one of `ERRORS`; returns if there is none.

    Args:
        data: the config's `data`, which the advice refers to.
    Raises:
        ValueError: memory ran out, or a worker was killed.
        RunInterrupted: a worker got SIGTERM, as all processes of a preempted job do.
    """
    if isinstance(error, worker_errors.SharedMemoryFullError):
        raise ValueError(f"{error}. {_shared_memory_advice(data)}") from error
    if worker_errors.too_many_files(error):
        raise ValueError(
            f"too many open files; `ulimit -n 65536` permits more, or {_less_data(data)}"
        ) from error
    ended = worker_errors.ended_worker(error)
    if ended is not None:
        pid, ended_by = ended
        if ended_by == "SIGTERM":
            raise RunInterrupted from error
        raise ValueError(worker_advice(pid, ended_by, data)) from error
    if out_of_memory(error):
        raise ValueError(f"{_STEP_ADVICE} ({first_line(error)})") from error


def worker_advice(pid: int, ended_by: str, data: DataConfig) -> str:
    """A message with the worker, its end, its task and what helps.

    Args:
        data: the config's `data`.
    """
    less = _less_data(data)
    ended = worker_errors.description(pid, ended_by)
    if ended_by == "SIGKILL":
        return f"{ended}, most likely because memory ran out. What helps: {less}; or more memory"
    if ended_by == "SIGBUS":
        return (
            f"{ended}: shared memory, through which batches travel, is full, or a "
            f"prepared file was cut while it was read. {_shared_memory_advice(data)}"
        )
    return (
        f"{ended}: a library crashed, not Python. Look at this case: `medconv preprocess` with --verify "
        "reads its prepared files again; `python -X faulthandler -m medconv.cli train` with "
        "data.num_workers=0 shows the line"
    )


def _shared_memory_advice(data: DataConfig) -> str:
    return f"What helps: a larger /dev/shm (`docker run --shm-size=8g`); {_less_data(data)}"


def _less_data(data: DataConfig) -> str:
    """Which keys need less memory, with their values."""
    keys = []
    for key in ("num_workers", "prefetch_factor", "batch_size", "patch_size"):
        value = getattr(data, key)  # None: planned
        keys.append(f"data.{key}" if value is None else f"data.{key} (now {value})")
    return f"fewer or smaller {', '.join(keys)}"
