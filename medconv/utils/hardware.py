"""What this machine can do: devices, precision, memory; and settings that fail or have no effect on it."""

import ctypes
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medconv.utils.errors import Argument, ArgumentError

_MOST_PROCESSES = 8  # per core; each takes half a gigabyte before it trains
log = logging.getLogger(__name__)
# Messages of torch's CPU allocator, its shared memory, CUDA, cuBLAS and cuDNN that have no error class.
_NO_MEMORY = re.compile(
    "(can't|[Cc]annot) allocate memory|allocate shared memory|CUDA (error: )?out of memory"
    "|_STATUS_ALLOC_FAILED|Cuda failure[^\n]*out of memory|Failed to CUDA calloc"
    # what cuDNN's search says once none of its algorithms has enough
    "|FIND was unable to find an engine"
)
# Parameters of glibc's `mallopt`: sizes from which an array has pages of its own, and from which free memory
# goes back to the system.
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1
# Versions of cuDNN, from and up to, that run half-precision Conv3d four times slower on contiguous input.
_SLOW_CUDNN = range(90800, 91500)
_CGROUPS = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Those that Slurm or a container allows, not all of the machine, where a process can ask for them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows


def read_at_once(value: Tensor) -> bool:
    """Whether the host can read a value without waiting for a device."""
    return value.is_cpu


def keep_freed_memory(largest: int = 2**28, spare: int = 2**29) -> None:
    """Large arrays that are freed are used again, not given back to the system and taken anew.

    Predicting 105 classes on a CPU, where each window's logits are 110 MB, spent 4 of 14 s on that, and a
    training step a tenth of its time. Only glibc has this setting; it holds for the process and its forks, in
    which some hundred MB then wait for use.

    Args:
        largest: bytes of an array. By default glibc keeps those of 32 MiB at most, if such were freed.
        spare: bytes that are free in a row, from which they are given back.
    """
    mallopt = _glibc("mallopt")
    # Older versions allow 32 MiB; a trim threshold alone would end its own search for a good value
    if mallopt is not None and (mallopt(_MMAP_THRESHOLD, largest) or mallopt(_MMAP_THRESHOLD, 2**25)):
        mallopt(_TRIM_THRESHOLD, spare)


def total_memory(cgroups: Path = _CGROUPS, process_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of main memory, or the lowest limit of this process's control groups (containers, Slurm).

    Args:
        cgroups: where the kernel shows all groups.
        process_cgroup: which of them this process is in: lines of `number:controllers:path`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = process_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2: one tree for all controllers
            root = cgroups
            file_name = "memory.max"
        elif "memory" in controllers.split(","):  # version 1: a tree for each
            root = cgroups / "memory"
            file_name = "memory.limit_in_bytes"
        else:
            continue
        innermost = root / group.lstrip("/")
        # In a container the path may be the host's, which does not exist here; its root is the container's
        for folder in (root, innermost, *innermost.parents):
            if folder.is_relative_to(root):
                with suppress(OSError, ValueError):  # no such group, or no limit
                    limits.append(int((folder / file_name).read_text()))
    return min(limit for limit in limits if limit)


def release_freed_memory() -> None:
    """Give what `keep_freed_memory` has kept back to the system, before arrays that cannot use it."""
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _glibc(name: str) -> Any:
    """A function of glibc; None on other systems."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def uses_gpu(accelerator: str) -> bool:
    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


# Lightning's short names
FULL_NAMES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def resolve_precision(precision: Any, accelerator: str) -> Any:
    """Lightning's `precision`, with `auto`: bf16 mixed where the hardware is fast at it, else fp32.

    Raises:
        ValueError: fp16 on a CPU, which has no fast fp16 convolutions.
    """
    gpu = uses_gpu(accelerator)
    if not gpu and str(precision).startswith("16"):
        raise ArgumentError("precision", f"={precision} needs a GPU; on a CPU take bf16-mixed or 32-true")
    if precision != "auto":
        return FULL_NAMES.get(str(precision), precision)
    if not gpu:
        return "bf16-mixed" if fast_bf16_cpu() else "32-true"
    return "bf16-mixed" if fast_bf16_gpu() else "16-mixed"


@cache
def fast_bf16_gpu() -> bool:
    """Not emulated, which is slower than fp16."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def fast_bf16_cpu() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def autocast_dtype(precision: Any) -> torch.dtype | None:
    """The autocast dtype of Lightning's `precision`; None without autocast."""
    name = FULL_NAMES.get(str(precision), str(precision))
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)


def check_devices(setting: Any, accelerator: str, launched: bool = False) -> Any:
    """`devices` of a trainer as a number, `auto` or a list of GPUs. On a CPU, devices are processes.

    Args:
        launched: a launcher started all processes; each may be bound to cores of its own and see no others.

    Raises:
        ValueError: the machine has fewer GPUs than configured, or it is no number of processes, or so many
            that memory would run out.
    """
    if setting in ("cpu", "gpu", "cuda"):
        raise ArgumentError(
            "devices",
            f"={setting}: it is a number, a list or auto; ",
            Argument("accelerator"),
            " says cpu or gpu",
        )
    gpu = uses_gpu(accelerator)
    if accelerator in ("gpu", "cuda") and not gpu:
        raise ArgumentError("accelerator", f"={accelerator}: no GPU is visible here; take auto or cpu")
    devices = setting
    # texts of the command line as numbers: `2`, `-1`, or a list such as `0,1`
    if isinstance(setting, str) and "," in setting:
        devices = [int(gpu) for gpu in setting.split(",")]
    elif isinstance(setting, str) and setting.lstrip("-").isdigit():
        devices = int(setting)
    if gpu:
        _check_gpus(devices, setting, launched)
        return devices
    if devices == "auto":
        return 1
    if not isinstance(devices, int) or devices < 1:
        raise ArgumentError("devices", f"={setting}: on a CPU it is a number of processes, 1 or more")
    cores = num_cores()
    if devices > _MOST_PROCESSES * cores and not launched:
        raise ArgumentError(
            "devices",
            f"={setting}: on a CPU at most {_MOST_PROCESSES} processes for each of its {cores} cores",
        )
    if devices > cores and not launched:
        log.warning("%d processes share %d cores: slower than one process for each core", devices, cores)
    return devices


def _check_gpus(devices: Any, setting: Any, launched: bool) -> None:
    if devices in ("auto", -1):
        return
    needed_gpus = devices
    if isinstance(devices, list):
        needed_gpus = max((int(gpu) for gpu in devices), default=-1) + 1
    gpus = torch.cuda.device_count()
    if isinstance(needed_gpus, int) and 1 <= needed_gpus <= gpus:
        return
    hint = "; srun's --gpus-per-task hides those of other tasks, take --gpus-per-node" if launched else ""
    raise ArgumentError("devices", f"={setting}: this machine has {gpus} GPUs{hint}")


def set_matmul_precision(matmul_precision: str) -> None:
    """Set the precision of fp32 products for this process: one of `MATMUL_PRECISIONS`."""
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = matmul_precision != "highest"


def benchmark_kernels(benchmark: bool | None, accelerator: str, deterministic: Any) -> bool | None:
    """Lightning's `benchmark`; None lets cuDNN try its algorithms on a GPU: patches have few shapes."""
    if benchmark is not None or not uses_gpu(accelerator):
        return benchmark
    return not deterministic


def warn_slow_cudnn() -> None:
    """Warn of versions that are slow at half-precision Conv3d on contiguous input (pytorch#166122)."""
    version = torch.backends.cudnn.version()
    if version is not None and version in _SLOW_CUDNN:
        log.warning(
            "cuDNN %d has slow half-precision Conv3d on contiguous input: keep channels_last", version
        )


def compiler_missing() -> str | None:
    """Why `torch.compile` cannot work here; None if it can."""
    if not torch.cuda.is_available():
        if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            return None
        return "it needs a C++ compiler (g++ or clang++) on this machine, found none"
    if torch.cuda.get_device_capability() < (7, 0):
        return "it needs a GPU of compute capability 7.0 or later"
    if os.environ.get("CC") or any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return None
    return "it needs a C compiler (gcc or clang) on this machine, found none"


def triton_missing() -> str | None:
    """Why Triton's kernels cannot run on a GPU here, and what to install; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "clang")):
        return None
    return "Triton needs a C compiler, found none (install gcc or clang, or set CC)"


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait for the work that is queued on the device: to CUDA from pinned memory."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class HostCopy:
    """A bool of the device for later: asked then, it waits for what was queued before it alone."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.to("cpu", non_blocking=True)  # into pinned memory
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def __bool__(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or in torch, NumPy or Python."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return _NO_MEMORY.search(str(error)) is not None


class DeviceCopies:
    """Copies tensors to a device; to CUDA on a stream of their own, so that they overlap with computing.

    On the stream that computes, a copy would begin only when all work queued before it has ended.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Copies, which work that is queued from now on may use. Args: tensors: in pinned memory for CUDA."""
        if device.type != "cuda":
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        computing.wait_stream(self._stream)
        for copy in copies.values():
            # Else its memory, once freed, would at once take the next copy, while it may still be read
            copy.record_stream(computing)
        return copies


# torch reads the first one that is set; the second one is its older name
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments() -> bool:
    """Let the memory that small tensors have left grow, so that larger ones use it again.

    Without it memory is taken in segments that cannot be joined: tensors that grow during a run take new ones
    beside those of their smaller predecessors, until the memory is full and all unused ones are given back.
    What the user has set stays. torch reads the setting once, at the first use of a GPU.

    Returns:
        Whether it was set.
    """
    if any(name in os.environ for name in _SETTINGS) or torch.cuda.is_initialized():
        return False
    os.environ[_SETTINGS[0]] = "expandable_segments:True"
    log.info("GPU memory: %s=%s, since patches grow", _SETTINGS[0], os.environ[_SETTINGS[0]])
    return True
