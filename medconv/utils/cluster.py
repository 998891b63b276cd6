"""Runs of several processes: the launcher (torchrun or srun), its agreement with the config, lost peers."""

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
# Messages of gloo, NCCL and their stores about a peer that ended, was cut off, or never connected.
_GONE = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|No route to host|Socket Timeout|TCPStore|"
    r"DistStoreError|[Tt]imed out (waiting|after)|client socket has (timed out|failed)"
)
_OWN_FAULT = re.compile(r"ncclInvalidUsage|ncclInvalidArgument|DataLoader timed out")
_ERROR_FILE = "error.txt"  # in the run's folder: why a process failed
_LATE = 5.0  # seconds until a file that another machine wrote is visible here


class PeerLostError(ConnectionError):
    """Another process of the run ended or cannot be reached; retryable: rerun to resume."""


@dataclass(frozen=True)
class Launcher:
    """The program that started the processes of this run. Args: devices: processes per machine."""

    name: str
    nodes: int
    devices: int


def launcher() -> Launcher | None:
    """The launcher of this process; None: started alone, and Lightning starts one process per further device.

    An srun of one task and a batch script without srun also count as None, so that `trainer.devices` works.
    Raises: ValueError: the machines have different numbers of processes.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        sizes = (int(env[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return _even("torchrun", *sizes)
    if srun_tasks() == 1:
        if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:  # each would run as rank 0
            started = f"mpirun started {env['OMPI_COMM_WORLD_SIZE']} processes"
            raise ValueError(f"{started}; start them by torchrun or srun instead")
        return None
    nodes = int(env["SLURM_STEP_NUM_NODES"])
    tasks_per_node = env["SLURM_STEP_TASKS_PER_NODE"]  # such as 4(x2), or 4(x2),1
    counts = {int(part.partition("(")[0]) for part in tasks_per_node.split(",")}
    return _even("srun", srun_tasks(), nodes, max(counts) if len(counts) == 1 else 0)


def job() -> str:
    """The id that a job keeps when it is restarted; empty if nothing restarts this process."""
    names = (name for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID") if name in os.environ)
    return next((f"{name}={os.environ[name]}" for name in names), "")


def restarted() -> bool:
    """Whether this is a restart of a job."""
    counts = (os.environ.get(name) or "0" for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return any(int(count) > 0 for count in counts)


def is_first() -> bool:
    """Whether this process is rank 0, for any launcher; works before the process group exists."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:  # also within srun, whose ranks then count torchruns
        return env["RANK"] == "0"
    ranks = ("SLURM_PROCID",) if srun_tasks() > 1 else _RANKS
    return not any(int(env.get(name, "0") or 0) for name in ranks)


def processes(num_nodes: int | None, devices: Any) -> tuple[int, Any]:
    """`trainer.num_nodes` and `trainer.devices` of the config; null takes what the launcher started.

    Raises: ValueError: config and launcher disagree, or the config has several machines and there is no
        launcher.
    """
    launched = launcher()
    if launched is None:
        if (num_nodes or 1) != 1 and "NODE_RANK" not in os.environ:
            raise ValueError(
                f"trainer.num_nodes={num_nodes}, but this process was started alone, on 1 machine; start it "
                "on all of them by torchrun or srun"
            )
        return num_nodes or 1, 1 if devices is None else devices
    by = launched.name
    if num_nodes not in (None, launched.nodes):
        raise ValueError(
            f"trainer.num_nodes={num_nodes}, but {by} started processes on {launched.nodes} machines; do not "
            f"set trainer.num_nodes, so that {by} decides"
        )
    if _count(devices) not in (None, launched.devices):
        raise ValueError(
            f"trainer.devices={devices}, but {by} started {launched.devices} processes on each machine; do "
            f"not set trainer.devices, so that {by} decides"
        )
    return launched.nodes, devices if isinstance(devices, list) else launched.devices


def timeout(seconds: float) -> timedelta:
    """The timeout of the process group. Raises: ValueError: `perf.timeout_seconds` is not positive."""
    if not seconds > 0:
        raise ValueError(f"perf.timeout_seconds must be positive, got {seconds}")
    return timedelta(seconds=seconds)


@contextmanager
def detecting_lost_peers(several: bool = True) -> Iterator[None]:
    """Wraps training. Args: several: whether the run has other processes.

    Raises: PeerLostError: a collective failed because another process ended.
    """
    try:
        yield
    except (distributed.DistError, RuntimeError) as error:
        lost = isinstance(error, distributed.DistError) or _GONE.search(str(error))
        if not (several and lost) or _OWN_FAULT.search(str(error)):
            raise
        raise PeerLostError(
            f"another process of this run ended or does not answer ({_reason(error)}); its own log says "
            "why. Run the same command again to resume from the last checkpoint"
        ) from error


@contextmanager
def sharing_errors(folder: Path) -> Iterator[None]:
    """Wraps a run. A process that fails writes the reason to the run's folder; the others report it.

    srun returns the highest exit code: without this, a user's mistake would look like a lost machine, and the
    job would be tried again.
    Raises: ValueError: instead of `PeerLostError`, if another process of this step wrote why it failed.
    """
    try:
        yield
    except PeerLostError as lost:
        reason = _written_reason(folder / _ERROR_FILE)
        if reason:
            raise ValueError(f"another process of this run failed: {reason}") from lost
        raise
    except Exception as error:
        if _attempt():
            folder.mkdir(parents=True, exist_ok=True)
            reason = " ".join(str(error).split()) or type(error).__name__
            write_text(folder / _ERROR_FILE, f"{_attempt()}\n{reason}\n")
        raise


def _written_reason(path: Path) -> str:
    deadline = time.monotonic() + _LATE
    while _attempt():
        try:
            attempt, reason = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            attempt = reason = ""
        if attempt == _attempt():
            return reason
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return ""


def _attempt() -> str:
    """Identifies this start of an srun step; empty without srun: torchrun restarts after any exit code."""
    if launcher() is None or "TORCHELASTIC_RUN_ID" in os.environ:
        return ""
    return " ".join(os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))


def _even(name: str, total: int, nodes: int, here: int) -> Launcher:
    if nodes * here != total:
        raise ValueError(
            f"{name} started {total} processes on {nodes} machines; it must be the same number on each"
        )
    return Launcher(name, nodes, here)


def srun_tasks() -> int:
    """The number of tasks of the srun step of this process."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def _count(devices: Any) -> int | None:
    """The number of devices that `trainer.devices` means; None: all of the machine's."""
    if isinstance(devices, str) and "," in devices:
        return len(devices.split(","))
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


def _reason(error: BaseException) -> str:
    """The first sentence of a library's message, without the source location in front of it."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0].rstrip(".")
