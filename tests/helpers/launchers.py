"""The environment variables that torchrun and Slurm set for a process, of 2 machines with 4 processes each."""

from __future__ import annotations

import os
from typing import Any

import pytest

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "WORLD_SIZE": 8,
    "GROUP_WORLD_SIZE": 2,
    "LOCAL_WORLD_SIZE": 4,
    "RANK": 0,
    "LOCAL_RANK": 0,
}
# of a PyTorchJob of Kubernetes with 8 replicas of one process each
JOB = {"RANK": 0, "WORLD_SIZE": 8, "MASTER_ADDR": "first", "MASTER_PORT": 23456}
STEP = {  # of srun
    "SLURM_STEP_NUM_TASKS": 8,
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]-ib",
    "SLURM_PROCID": 0,
    "SLURM_NTASKS": 8,
    "SLURM_LOCALID": 0,
    "SLURM_NODEID": 0,
    "SLURM_JOB_ID": 4711,
}
# of a batch script, without srun
BATCH = {"SLURM_NTASKS": 8, "SLURM_PROCID": 0, "SLURM_NODEID": 0, "SLURM_LOCALID": 0, "SLURM_JOB_ID": 4711}
_GROUP = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")


def launch(monkeypatch: pytest.MonkeyPatch, **variables: Any) -> None:
    """As if a launcher had started this process, with these variables alone."""
    others = ("SLURM_", "TORCHELASTIC_", "OMPI_")
    for key in [k for k in os.environ if k.startswith(others) or k in (*_RANKS, *_GROUP)]:
        monkeypatch.delenv(key)
    for key, value in variables.items():
        monkeypatch.setenv(key, str(value))
