"""Hardware and versions, of a process that may look at the GPU."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import medconv
from gpu_checks.setting import FORK

_PACKAGES = ("lightning", "monai", "triton", "numpy", "hydra-core", "nibabel", "onnxruntime-gpu", "nnunetv2")
_LIMIT_S = 60.0
_LAUNCHES = 1000  # fewer than the device queues, so that the host never waits for it


def describe(kind: str, file: Path) -> dict[str, Any]:
    """Asked of a process of its own, since a process that has seen CUDA must not be forked."""
    process = FORK.Process(target=_write, args=(kind, file))
    process.start()
    process.join(_LIMIT_S)
    if process.is_alive():
        process.kill()
    known = json.loads(file.read_text()) if file.is_file() else {"hardware": "unknown", "gpus": 0}
    return {"device": kind, **known}


def _write(kind: str, file: Path) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(_described(kind)))
    partial.replace(file)


def _described(kind: str) -> dict[str, Any]:
    """Raises: RuntimeError: CUDA does not work."""
    about: dict[str, Any] = {
        "hardware": platform.processor() or platform.machine(),
        "gpus": 0,
        "versions": _versions(),
        "git_commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
    }
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        about |= {"hardware": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        about |= {"memory_gb": round(total / 2**30, 1), "free_gb": round(free / 2**30, 1), "driver": driver}
        about["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        about["launch_us"] = round(_launch_microseconds(), 2)
    return about


def _launch_microseconds() -> float:
    """What the host spends on one call of torch that does next to nothing on the device."""
    value = torch.zeros((), device="cuda")
    for _ in range(_LAUNCHES):
        value.add_(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        value.add_(0)
    spent = time.perf_counter() - start  # without a wait at the end: the host's share
    return 1e6 * spent / _LAUNCHES


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "medconv": medconv.__version__}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    found["cudnn"] = None if cudnn is None else str(cudnn)
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
