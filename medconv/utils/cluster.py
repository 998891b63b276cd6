"""Several machines: what torchrun or Slurm's srun started, whether the config agrees, and when a process
is gone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from medconv.utils.atomic_io import write_text

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
# What gloo, NCCL and their stores say of a peer that ended, was cut off, or did not come
_GONE = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|No route to host|Socket Timeout|[Tt]imed out "
    r"(waiting|after)|"
    r"client socket has (timed out|failed)|TCPStore|DistStoreError"
)
_OWN_FAULT = re.compile(r"ncclInvalidUsage|ncclInvalidArgument|DataLoader timed out")
_FAULT = "error.txt"  # in the run's folder: why a process failed
_LATE = 5.0  # seconds until a file that another machine wrote is seen here


class PeerLostError(ConnectionError):
    """Another process of the run is gone or cannot be reached; the run can be started again."""


@dataclass(frozen=True)
class Launcher:
    """What started this process beside others. Args: devices: processes on each of the machines."""

    name: str
    nodes: int
    devices: int


def launcher() -> Launcher | None:
    """None: this process was started alone, and Lightning starts one more for each further device.

    An srun of one task counts as none, so that `trainer.devices` works in it. So does a batch script's own
    environment.
    Raises: ValueError: different numbers of processes on the machines.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return _even(
            "torchrun", *(int(env[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        )
    if _tasks() == 1:
        if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:  # each would take itself for the first
            raise ValueError(
                f"mpirun started {env['OMPI_COMM_WORLD_SIZE']} processes; start them by torchrun or srun "
                "instead"
            )
        return None
    nodes, each = (
        int(env["SLURM_STEP_NUM_NODES"]),
        env["SLURM_STEP_TASKS_PER_NODE"],
    )  # such as 4(x2), or 4(x2),1
    counts = {int(part.partition("(")[0]) for part in each.split(",")}
    return _even("srun", _tasks(), nodes, max(counts) if len(counts) == 1 else 0)


def job() -> str:
    """What a job that is started again has in common with its earlier attempts; empty where nothing starts
    it again.
    """
    return next(
        (
            f"{name}={os.environ[name]}"
            for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
            if name in os.environ
        ),
        "",
    )


def restarted() -> bool:
    """Whether this is a later attempt of a job."""
    counts = (os.environ.get(name) or "0" for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return any(int(count) > 0 for count in counts)


def is_first() -> bool:
    """Whether this process is rank 0 of its run, however it was launched; known before there is a process
    group.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:  # also within srun, whose numbers then count torchruns
        return env["RANK"] == "0"
    ranks = ("SLURM_PROCID",) if _tasks() > 1 else _RANKS
    return not any(int(env.get(name, "0") or 0) for name in ranks)


def processes(num_nodes: int | None, devices: Any) -> tuple[int, Any]:
    """`trainer.num_nodes` and `trainer.devices`: what the config says, and what the launcher started where it
    says nothing.

    Raises: ValueError: the two disagree, or several machines are asked for and nothing started a process on
    the others.
    """
    launched = launcher()
    if launched is None:
        if (num_nodes or 1) != 1 and "NODE_RANK" not in os.environ:
            raise ValueError(
                f"trainer.num_nodes={num_nodes}, but this process was started alone, on 1 machine; start it "
                "on all of them by torchrun or srun"
            )
        return num_nodes or 1, 1 if devices is None else devices
    settings = {
        "num_nodes": (num_nodes, num_nodes, launched.nodes),
        "devices": (devices, _count(devices), launched.devices),
    }
    for key, (setting, configured, launched_number) in settings.items():
        if configured is not None and configured != launched_number:
            what = (
                f"processes on {launched_number} machines"
                if key == "num_nodes"
                else f"{launched_number} processes on each machine"
            )
            raise ValueError(
                f"trainer.{key}={setting}, but {launched.name} started {what}; leave trainer.{key} out, and "
                f"{launched.name} decides"
            )
    return launched.nodes, devices if isinstance(devices, list) else launched.devices


def timeout(perf: Any) -> timedelta:
    """Of the process group. Raises: ValueError: `perf.timeout_seconds` is not positive."""
    seconds = perf["timeout_seconds"]
    if not seconds > 0:
        raise ValueError(f"perf.timeout_seconds must be positive, got {seconds}")
    return timedelta(seconds=seconds)


@contextmanager
def naming_lost(several: bool = True) -> Iterator[None]:
    """Around training. Args: several: whether the run has other processes.

    Raises: Lost: a collective failed since another process is gone.
    """
    try:
        yield
    except (distributed.DistError, RuntimeError) as error:
        gone = isinstance(error, distributed.DistError) or _GONE.search(str(error))
        if not (several and gone) or _OWN_FAULT.search(str(error)):
            raise
        raise PeerLostError(
            f"another process of this run is gone or does not answer ({_said(error)}); why is among the "
            "messages of its own machine. The same command goes on from the last checkpoint"
        ) from error


@contextmanager
def blaming(folder: Path) -> Iterator[None]:
    """Around a run. A process that fails says why in the run's folder, for the others, which lose it and end
    for that.

    srun returns the highest code: without this a mistake of the user's would come back as a lost machine, to
        be tried again.
    Raises: ValueError: in place of `PeerLostError` where another process of this step said why it failed.
    """
    try:
        yield
    except PeerLostError as lost:
        why = _said_why(folder / _FAULT)
        if why:
            raise ValueError(f"another process of this run failed: {why}") from lost
        raise
    except Exception as error:
        if _attempt():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(
                folder / _FAULT, f"{_attempt()}\n{' '.join(str(error).split()) or type(error).__name__}\n"
            )
        raise


def _said_why(path: Path) -> str:
    deadline = time.monotonic() + _LATE
    while _attempt():
        try:
            attempt, why = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            attempt = why = ""
        if attempt == _attempt():
            return why
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return ""


def _attempt() -> str:
    """This start of a step of srun's; empty without one: torchrun starts again whatever the code."""
    if launcher() is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return ""
    return " ".join(os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))


def _even(name: str, total: int, nodes: int, here: int) -> Launcher:
    if nodes * here != total:
        raise ValueError(
            f"{name} started {total} processes on {nodes} machines; it must be the same number on each"
        )
    return Launcher(name, nodes, here)


def _tasks() -> int:
    """Of the step that srun started this process in."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def _count(devices: Any) -> int | None:
    """How many a value of `trainer.devices` means; None: whatever there is."""
    if isinstance(devices, str) and "," in devices:
        return len(devices.split(","))
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def _said(error: BaseException) -> str:
    """A library's message without the place in its source that it begins with, and without advice."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0].rstrip(".")
