"""Several machines: what torchrun or Slurm's srun started, whether the config agrees, and when a process is gone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from torch import distributed

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
# What gloo, NCCL and their stores say of a peer that ended, was cut off, or did not come
_GONE = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|No route to host|Socket Timeout|[Tt]imed out (waiting|after)|"
    r"client socket has (timed out|failed)|TCPStore|DistStoreError"
)


class Lost(ConnectionError):
    """Another process of the run is gone or cannot be reached; the run can be started again."""


@dataclass(frozen=True)
class Launcher:
    """What started this process beside others. Args: devices: processes on each of the machines."""

    name: str
    nodes: int
    devices: int


def launcher() -> Launcher | None:
    """None: this process was started alone, and Lightning starts one more for each further device.

    An srun of one task counts as none, so that `trainer.devices` works in it. So does a batch script's own environment.
    Raises: ValueError: different numbers of processes on the machines.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return _even("torchrun", *(int(env[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")))
    if _tasks() == 1:
        return None
    nodes, each = int(env["SLURM_STEP_NUM_NODES"]), env["SLURM_STEP_TASKS_PER_NODE"]  # such as 4(x2), or 4(x2),1
    return _even("srun", _tasks(), nodes, int(each.partition("(")[0].partition(",")[0]))


def is_first() -> bool:
    """Whether this process is rank 0 of its run, however it was launched; known before there is a process group."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:  # also within srun, whose numbers then count torchruns
        return env["RANK"] == "0"
    ranks = ("SLURM_PROCID",) if _tasks() > 1 else _RANKS
    return not any(int(env.get(name, "0") or 0) for name in ranks)


def processes(num_nodes: int | None, devices: Any) -> tuple[int, Any]:
    """`trainer.num_nodes` and `trainer.devices`: what the config says, and what the launcher started where it says nothing.

    Raises: ValueError: the two disagree, or several machines are asked for and nothing started a process on the others.
    """
    found = launcher()
    if found is None:
        if (num_nodes or 1) != 1 and "NODE_RANK" not in os.environ:
            raise ValueError(
                f"trainer.num_nodes={num_nodes}, but this process was started alone, on 1 machine; start it on all of them "
                "by torchrun or srun"
            )
        return num_nodes or 1, 1 if devices is None else devices
    asked = {"num_nodes": (num_nodes, num_nodes, found.nodes), "devices": (devices, _count(devices), found.devices)}
    for key, (given, wanted, there) in asked.items():
        if wanted is not None and wanted != there:
            what = f"processes on {there} machines" if key == "num_nodes" else f"{there} processes on each machine"
            raise ValueError(
                f"trainer.{key}={given}, but {found.name} started {what}; leave trainer.{key} out, and {found.name} decides"
            )
    return found.nodes, devices if isinstance(devices, list) else found.devices


def environment() -> ClusterEnvironment | None:
    """For Lightning's `plugins`; None: it finds out by itself, and right.

    It would take a batch script of several tasks, without srun, for one of those tasks, and wait for the others.
    """
    found = launcher()
    if found is not None and found.name == "srun":
        return Step()
    return LightningEnvironment() if found is None and "SLURM_NTASKS" in os.environ else None


class Step(SLURMEnvironment):
    """Lightning's, from what srun says of this step, whatever the whole job has; signals are not its business."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR") or self.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])

    def world_size(self) -> int:
        return _tasks()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """`processes` has compared them."""

    @staticmethod
    def _validate_srun_used() -> None: ...

    @staticmethod
    def _validate_srun_variables() -> None: ...


class SameStart(Callback):
    """All processes go on from the same step: where the run folder is not the same for all, only some find a checkpoint."""

    def __init__(self) -> None:
        self._step = 0

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._step = checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the sanity check, which only those that begin make."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        steps: list[int] = [0] * distributed.get_world_size()
        distributed.all_gather_object(steps, self._step)
        if len(set(steps)) > 1:
            raise ValueError(
                f"{trainer.default_root_dir}: not the same folder for all processes, they would go on from steps {steps}; "
                "it must be on a file system that all machines share"
            )


def timeout(perf: Any) -> timedelta:
    """Of the process group. Raises: ValueError: `perf.timeout_seconds` is not positive."""
    seconds = perf["timeout_seconds"]
    if not seconds > 0:
        raise ValueError(f"perf.timeout_seconds must be positive, got {seconds}")
    return timedelta(seconds=seconds)


@contextmanager
def naming_lost() -> Iterator[None]:
    """Around training. Raises: Lost: a collective failed since another process is gone."""
    try:
        yield
    except (distributed.DistError, RuntimeError) as error:
        if not (isinstance(error, distributed.DistError) or _GONE.search(str(error))):
            raise
        raise Lost(
            f"another process of this run is gone or does not answer ({_said(error)}); why is among the messages of its own "
            "machine. The same command goes on from the last checkpoint"
        ) from error


def _even(name: str, total: int, nodes: int, here: int) -> Launcher:
    if nodes * here != total:
        raise ValueError(f"{name} started {total} processes on {nodes} machines; it must be the same number on each")
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
