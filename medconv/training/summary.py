"""What `summary.json` holds: its keys, the best checkpoint's scores, how the run ended, and its machine."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any

import torch

import medconv
from medconv.config.schema import PACKAGE
from medconv.targets import Targets
from medconv.utils import cluster
from medconv.utils.hardware import num_cores
from medconv.utils.signals import RunInterrupted

# Those that other programs rely on, in the order of the file.
KEYS = (
    "val/dice",
    "val/dice_per_class",
    "steps",
    "wall_seconds",
    "fit_seconds",
    "samples_per_second",
    "data_wait_share",
    "step_shares",
    "verdict",
    "conv_price",
    "peak_memory_bytes",
    "status",
    "versions",
    "hardware",
    "git_commit",
    "command",
)
_PACKAGES = ("torch", "lightning", "monai", "hydra-core", "nibabel", "numpy", "tensorboard")


def status_after(error: BaseException) -> str:
    """The status of a run that ended with this exception."""
    if isinstance(error, RunInterrupted):
        return "interrupted" if error.by_hand else "preempted"
    if isinstance(error, cluster.PeerLostError):
        return "preempted"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def best_scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """Scores as they are logged, and the row of each case. Args: record: a checkpoint's `medconv`."""
    rows = record["validation"]
    values = Targets.from_plain(record["targets"]).scores.summary(rows)
    if record.get("temperature") is not None:
        values["temperature"] = record["temperature"]
    return {**{f"val/{name}": value for name, value in values.items()}, "val/cases": rows}


def is_valid(content: Any) -> bool:
    """Whether scores are numbers, and all cases have the same classes; other programs rely on both."""
    if not isinstance(content, dict):
        return False
    for key in ("val/cases", "skipped_cases"):
        if not isinstance(content.get(key), (dict, NoneType)):
            return False
    rows = list((content.get("val/cases") or {}).values())
    if not all(isinstance(row, dict) for row in rows):
        return False
    if len({tuple(row) for row in rows}) > 1:  # the names of their classes
        return False
    return _are_numbers([content.get("val/dice"), *rows])


def _are_numbers(content: Any) -> bool:
    """Whether all values are numbers or null, those in lists and objects, too."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return all(map(_are_numbers, content))
    return content is None or type(content) in (bool, int, float)


def run_metadata(trainer: Any) -> dict[str, Any]:
    """What `summary.json` says of software, hardware and command. Args: trainer: Lightning's."""
    device = trainer.strategy.root_device
    name = torch.cpu.get_capabilities().get("cpu_name")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    program = Path(sys.argv[0]).name
    if program == "__main__.py":  # of `python -m medconv`
        program = "medconv"
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
        "command": shlex.join([program, *sys.argv[1:]]),
        "job": cluster.job(),
    }


def git_commit() -> str | None:
    """The commit of the checkout that medconv runs from; None: medconv is installed as a package."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE.parent), "rev-parse", "HEAD"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return git.stdout.strip()


def peak_memory(on_gpu: bool) -> int:
    """Bytes: of the GPU, or resident memory on a CPU."""
    if on_gpu:
        return int(torch.cuda.max_memory_allocated())
    import resource

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * 1024
