"""Metadata of a run: versions, hardware, commit, command, and peak memory."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import medconv
from medconv.config.schema import PACKAGE
from medconv.utils import cluster
from medconv.utils.cores import num_cores

_PACKAGES = ("torch", "lightning", "monai", "hydra-core", "nibabel", "numpy", "tensorboard")


def of(trainer: Any) -> dict[str, Any]:
    """What `summary.json` says of software, hardware and command. Args: trainer: Lightning's."""
    device = trainer.strategy.root_device
    name = torch.cpu.get_capabilities().get("cpu_name")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "versions": {
            "python": platform.python_version(),
            # Unlike the package's metadata, it is there in a checkout that is not installed
            "medconv": medconv.__version__,
            **{name: version(name) for name in _PACKAGES},
        },
        "hardware": {
            "device": device.type,
            "name": name or platform.processor(),
            "devices": trainer.world_size,
            "cores": num_cores(),
            "torch_threads": torch.get_num_threads(),
        },
        "git_commit": git_commit(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "job": cluster.job(),
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "medconv" if name == "__main__.py" else name  # of `python -m medconv`


def git_commit() -> str | None:
    """Of the checkout that medconv runs from; None: medconv is installed as a package."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE.parent), "rev-parse", "HEAD"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip()


def peak_memory() -> int:
    """Bytes: of the GPU, or resident memory on a CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    import resource

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * 1024
