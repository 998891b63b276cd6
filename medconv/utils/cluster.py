"""Runs of several processes: their launcher, its agreement with the config, lost peers."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed

from medconv.utils.atomic_io import write_text
from medconv.utils.errors import Argument, ArgumentError

# Messages of gloo, NCCL and their stores about a peer that ended, was cut off, or never connected.
_LOST_PEER = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|No route to host|Socket Timeout|TCPStore|"
    r"DistStoreError|[Tt]imed out (waiting|after)|client socket has (timed out|failed)"
)
# Messages that look alike, but blame this process.
_NO_LOST_PEER = re.compile(
    r"ncclInvalidUsage|ncclInvalidArgument|DataLoader timed out|Cuda failure[^\n]*out of memory|"
    r"Failed to CUDA calloc"
)
TORCHRUN = "torchrun"
SRUN = "srun"
# One that sets torch's variables alone, such as a PyTorchJob of Kubernetes; its name in messages
JOB = "the job (RANK, WORLD_SIZE)"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
# What versions of mpirun tell their processes: Open MPI, MPICH and Intel MPI, MVAPICH
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_ERROR_FILE = "error.txt"  # in the run's folder: why a process failed
# Environment variable: another file for it, where a batch script looks
_ERROR_FILE_VARIABLE = "MEDCONV_ERROR_FILE"
_VISIBLE_SECONDS = 5.0  # until a file that another machine wrote is visible here


class PeerLostError(ConnectionError):
    """Another process of the run ended or cannot be reached; retryable: rerun to resume."""


@dataclass(frozen=True)
class Launcher:
    """The program that started the processes of this run.

    Args:
        name: TORCHRUN, SRUN or JOB.
        nodes: the number of machines.
        devices: processes per machine.
    """

    name: str
    nodes: int
    devices: int


def launcher() -> Launcher | None:
    """The launcher of this process; None: started alone, and Lightning starts one process per further device.

    An srun of one task and a batch script without srun also count as None, so that `devices` works.

    Raises:
        ValueError: the machines have different numbers of processes, or the processes cannot find each other.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        return _launcher(
            TORCHRUN,
            num_processes=int(environment["WORLD_SIZE"]),
            nodes=int(environment["GROUP_WORLD_SIZE"]),
            processes_per_node=int(environment["LOCAL_WORLD_SIZE"]),
        )
    if srun_tasks() > 1:
        return _launcher(
            SRUN,
            num_processes=srun_tasks(),
            nodes=int(environment["SLURM_STEP_NUM_NODES"]),
            processes_per_node=_srun_tasks_per_node(),
        )
    # Lightning, which sets LOCAL_RANK and WORLD_SIZE for the processes that it starts, leaves a RANK that was
    # there as it is
    started_by_lightning = "LOCAL_RANK" in environment and "LOCAL_WORLD_SIZE" not in environment
    if "RANK" in environment and _number("WORLD_SIZE", 1) > 1 and not started_by_lightning:
        return _job_launcher()
    mpi_processes = max(_number(name, 1) for name in _MPI_SIZES)
    if mpi_processes > 1:
        # Each of them would run as rank 0.
        raise ValueError(f"mpirun started {mpi_processes} processes; start them by torchrun or srun instead")
    return None


def _job_launcher() -> Launcher:
    """Raises: ValueError: its variables contradict each other, so that processes would wait for ever."""
    rank = _number("RANK", 0)
    world_size = _number("WORLD_SIZE", 1)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, so the processes need MASTER_ADDR and "
            "MASTER_PORT to find each other; unset RANK to train alone"
        )
    _number("MASTER_PORT", 1)
    if rank >= world_size:
        raise ValueError(f"RANK={rank} must be below WORLD_SIZE={world_size}")
    for_torchrun = os.environ.get("PET_NPROC_PER_NODE", "")
    if for_torchrun.isdigit() and int(for_torchrun) > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"PET_NPROC_PER_NODE={for_torchrun} asks for several processes on each machine; start them by "
            "`torchrun -m medconv.cli train ...`, which reads the PET_ variables"
        )
    devices = max(1, _number("LOCAL_WORLD_SIZE", 1))
    return _launcher(JOB, num_processes=world_size, nodes=world_size // devices, processes_per_node=devices)


def _number(name: str, default: int) -> int:
    """An environment variable; the default where it is empty. Raises: ValueError: it is no whole number."""
    value = os.environ.get(name) or str(default)
    if value.isdigit():
        return int(value)
    hint = ""
    if "://" in value:
        hint = "; Kubernetes sets it for a service named `master`: give the service another name"
    raise ValueError(f"the environment variable {name} must be a whole number, got {value}{hint}")


def _launcher(name: str, num_processes: int, nodes: int, processes_per_node: int) -> Launcher:
    if nodes * processes_per_node != num_processes:
        raise ValueError(
            f"{name} started {num_processes} processes on {nodes} machines; it must be the same number on "
            "each"
        )
    return Launcher(name, nodes, processes_per_node)


def srun_tasks() -> int:
    """The number of tasks of the srun step of this process."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def _srun_tasks_per_node() -> int:
    """0 if the machines have different numbers."""
    counts = set()
    # Such as 4(x2), or 4(x2),1
    for entry in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        counts.add(int(entry.partition("(")[0]))
    return counts.pop() if len(counts) == 1 else 0


def has_neighbours() -> bool:
    """Whether other processes of the same run may be on this machine, and share its memory."""
    return "LOCAL_RANK" in os.environ or srun_tasks() > 1


def local_rank() -> int:
    """The number of this process on its machine, as torchrun or srun gives it; 0 if it was started alone."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ.get("SLURM_LOCALID") or "0") if srun_tasks() > 1 else 0


def job() -> str:
    """The id that a job keeps when it is restarted; empty if nothing restarts this process."""
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MEDCONV_JOB"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    return ""


def restarted() -> bool:
    """Whether this is a restart of a job."""
    names = ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"]
    if os.environ.get("MEDCONV_JOB"):  # of a sweep's task on another batch system
        names.append("MEDCONV_RESTARTS")
    return any(int(os.environ.get(name) or "0") > 0 for name in names)


def is_first() -> bool:
    """Whether this process is rank 0, for any launcher; works before the process group exists."""
    # First: torchrun may run within srun, whose ranks then count torchruns.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.environ["RANK"] == "0"
    variables = ("SLURM_PROCID",) if srun_tasks() > 1 else _RANK_VARIABLES
    return all(int(os.environ.get(name) or "0") == 0 for name in variables)


def processes(num_nodes: int | None, devices: Any) -> tuple[int, Any]:
    """`num_nodes` and `devices` of a trainer; None takes what the launcher started.

    Raises:
        ValueError: config and launcher disagree, or the config has several machines and there is no launcher.
    """
    launched = launcher()
    if launched is None:
        # With NODE_RANK a user has started a process on each machine, as Lightning documents it.
        if (num_nodes or 1) != 1 and "NODE_RANK" not in os.environ:
            raise ArgumentError(
                "num_nodes",
                f"={num_nodes}, but this process was started alone, on 1 machine; start it on all of them by "
                "torchrun or srun",
            )
        return num_nodes or 1, 1 if devices is None else devices
    name = launched.name
    if num_nodes not in (None, launched.nodes):
        raise ArgumentError(
            "num_nodes",
            f"={num_nodes}, but {name} started processes on {launched.nodes} machines; do not set ",
            Argument("num_nodes"),
            f", so that {name} decides",
        )
    if device_count(devices) not in (None, launched.devices):
        raise ArgumentError(
            "devices",
            f"={devices}, but {name} started {launched.devices} processes on each machine; do not set ",
            Argument("devices"),
            f", so that {name} decides",
        )
    return launched.nodes, devices if isinstance(devices, list) else launched.devices


def device_count(devices: Any) -> int | None:
    """The number of devices that a setting of `devices` means; None: all of the machine's."""
    if isinstance(devices, str) and "," in devices:
        return len(devices.split(","))
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() else None


@contextmanager
def detecting_lost_peers() -> Iterator[None]:
    """Wraps the training of a run of several processes.

    Raises:
        PeerLostError: a collective failed because another process ended.
    """
    try:
        yield
    except (distributed.DistError, RuntimeError) as error:
        if not _names_lost_peer(error):
            raise
        raise PeerLostError(
            f"another process of this run ended or does not answer ({_first_sentence(error)}); its own log "
            "says why. Run the same command again to resume from the last checkpoint"
        ) from error


def _names_lost_peer(error: RuntimeError) -> bool:
    if _NO_LOST_PEER.search(str(error)):
        return False
    return isinstance(error, distributed.DistError) or _LOST_PEER.search(str(error)) is not None


def _first_sentence(error: BaseException) -> str:
    """The first sentence of a library's message, without the source location in front of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    without_location = re.sub(r"^\[[^\]]*\]\s*", "", line)
    return without_location.partition(". ")[0].rstrip(".")


@contextmanager
def sharing_errors(folder: Path) -> Iterator[None]:
    """Wraps a run. A process that fails writes the reason to the run's folder; the others report it.

    srun returns the highest exit code: without this, a user's mistake would look like a lost machine, and the
    job would be tried again.

    Raises:
        ValueError: instead of `PeerLostError`, if another process of this step wrote why it failed.
    """
    try:
        yield
    except PeerLostError as lost:
        reason = _reason_of_peer(_error_file(folder))
        if reason:
            raise ValueError(f"another process of this run failed: {reason}") from lost
        raise
    except Exception as error:
        attempt = _attempt()
        if attempt:
            path = _error_file(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            reason = " ".join(str(error).split()) or type(error).__name__
            write_text(path, f"{attempt}\n{reason}\n")
        raise


def _error_file(folder: Path) -> Path:
    return Path(os.environ.get(_ERROR_FILE_VARIABLE) or folder / _ERROR_FILE)


def _reason_of_peer(path: Path) -> str:
    """Why another process of this attempt failed; empty if none wrote it in time."""
    attempt = _attempt()
    if not attempt:
        return ""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):  # not there yet, or not completely
            lines = []
        if len(lines) == 2 and lines[0] == attempt:
            return lines[1]
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.2)


def _attempt() -> str:
    """Identifies this start of an srun step; empty without srun: torchrun restarts after any exit code."""
    started_by = launcher()
    if started_by is None or started_by.name != SRUN:
        return ""
    variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return " ".join(os.environ.get(name, "") for name in variables)
