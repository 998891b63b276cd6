"""medconv/utils/hardware.py: missing devices are errors before any work, and settings fit the hardware."""

import os
import subprocess
import sys

import pytest
import torch

from medconv.training.identity import config_differences
from medconv.utils import hardware
from medconv.utils.hardware import (
    DeviceCopies,
    HostCopy,
    autocast_dtype,
    benchmark_kernels,
    check_devices,
    compiler_missing,
    fast_bf16_gpu,
    out_of_memory,
    resolve_precision,
    set_matmul_precision,
    triton_missing,
    warn_slow_cudnn,
)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("devices", [4, "4", [0, 3]])
def test_devices_that_the_machine_lacks_are_refused(devices, two_gpus):
    with pytest.raises(ValueError, match=r"devices=.*: this machine has 2 GPUs"):
        check_devices(devices, "auto")


@pytest.mark.parametrize("devices", [1, 2, "2", "auto", -1, [1]])
def test_devices_that_the_machine_has_are_accepted(devices, two_gpus):
    check_devices(devices, "gpu")


def test_a_gpu_is_refused_on_a_machine_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"accelerator=gpu: no GPU is visible here; take auto or cpu"):
        check_devices(1, "gpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: Resource unavailable (11)"),
        RuntimeError("unable to mmap 8 bytes from file </torch_1>: Cannot allocate memory (12)"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_errors_about_memory_are_recognised(error):
    assert out_of_memory(error)


def test_other_errors_are_not_about_memory():
    assert not out_of_memory(RuntimeError("shapes cannot be multiplied"))


def test_the_matmul_precision_is_set():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_matmul_precision("highest")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
        set_matmul_precision("high")
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_missing_triton_or_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(hardware, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", "cc")
    assert triton_missing() is None
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install gcc or clang" in str(triton_missing())
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    assert "pip install triton" in str(triton_missing())


def test_cudnn_tries_its_algorithms_by_default(two_gpus):
    assert benchmark_kernels(None, "gpu", None) is True
    assert benchmark_kernels(None, "gpu", True) is False
    assert benchmark_kernels(None, "cpu", None) is None
    assert benchmark_kernels(False, "gpu", None) is False


def test_an_old_gpu_has_no_compiler(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert "compute capability 7.0" in str(compiler_missing())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert compiler_missing() is None


@pytest.mark.parametrize("devices", [None, 0, -1, [], "0,1", "many"])
def test_devices_of_a_cpu_are_a_number(devices):
    with pytest.raises(ValueError, match=r"devices=.*: on a CPU it is a number of processes"):
        check_devices(devices, "cpu")


def test_devices_are_normalised(two_gpus):
    assert [check_devices(d, "cpu") for d in ("1", "auto", 1)] == [1, 1, 1]
    assert [check_devices(d, "gpu") for d in ("2", "0,1", "auto")] == [2, [0, 1], "auto"]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", None])
def test_a_chosen_precision_is_kept(precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_precision(precision, "gpu") == precision
    if not str(precision).startswith("16"):
        assert resolve_precision(precision, "cpu") == precision


@pytest.mark.parametrize(
    ("short", "full"), [(16, "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true"), ("64", "64-true")]
)
def test_lightnings_short_names_mean_the_same_everywhere(short, full, monkeypatch):
    """Also where steps are timed, and in prediction."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_precision(short, "gpu") == full
    assert autocast_dtype(short) == autocast_dtype(full)  # of a checkpoint
    assert not config_differences({"trainer": {"precision": short}}, {"trainer": {"precision": full}})


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", 16])
def test_fp16_needs_a_gpu(precision, monkeypatch):
    with pytest.raises(ValueError, match=rf"precision={precision} needs a GPU"):
        resolve_precision(precision, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"precision={precision} needs a GPU"):
        resolve_precision(precision, "auto")


def test_auto_precision_follows_the_hardware(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert [resolve_precision("auto", a) for a in ("auto", "gpu", "cuda")] == ["bf16-mixed"] * 3
    fast_bf16_gpu.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert resolve_precision("auto", "gpu") == "16-mixed"
    fast_bf16_gpu.cache_clear()
    for capability in ("amx_bf16", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=capability: {name: True})
        assert resolve_precision("auto", "cpu") == "bf16-mixed"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert resolve_precision("auto", "cpu") == "32-true"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_precision("auto", "auto") == "32-true"


@pytest.mark.parametrize(
    ("version", "warns"), [(90701, False), (90800, True), (91002, True), (91500, False), (None, False)]
)
def test_slow_cudnn_is_named(version, warns, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    warn_slow_cudnn()
    assert (f"cuDNN {version} has slow half-precision Conv3d" in caplog.text) == warns


@pytest.mark.parametrize(
    ("devices", "launched", "warns"), [(3, False, True), (3, True, False), (2, False, False)]
)
def test_more_processes_than_cores_are_slow_and_not_wrong(devices, launched, warns, monkeypatch, caplog):
    """Under a launcher each process may be bound to cores of its own, and sees no others."""
    monkeypatch.setattr(hardware, "num_cores", lambda: 2)
    assert check_devices(devices, "cpu", launched) == devices
    expected = ["3 processes share 2 cores: slower than one process for each core"] if warns else []
    assert caplog.messages == expected


class LateCopy:
    """A bool of a device whose copy arrives when its event is waited for."""

    is_cuda = True

    def __init__(self) -> None:
        self.host = torch.tensor(False)

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert (device, non_blocking) == ("cpu", True)
        return self.host


@pytest.mark.parametrize("truth", [True, False])
def test_a_bool_of_the_device_is_read_once_its_own_copy_is_there(truth, monkeypatch):
    assert bool(HostCopy(torch.tensor(truth))) == truth
    device, calls = LateCopy(), []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")
            device.host.fill_(truth)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    copy = HostCopy(device)
    assert calls == ["record"] and bool(copy) == truth and calls == ["record", "synchronize"]


@pytest.fixture(scope="module")
def memory() -> dict[str, int]:
    """What a process of its own tells: new pages for four arrays of 40 MB, before memory is kept and after; and
    MB that are kept of a freed array of 200 MB, and after they were released.
    """
    code = """
import ctypes
import resource
from pathlib import Path
import numpy as np
from medconv.utils.hardware import keep_freed_memory, release_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which there are more or fewer to count

def faults_of_arrays():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.ones(5_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6

freed = faults_of_arrays()
keep_freed_memory()
kept = faults_of_arrays()
release_freed_memory()
before = resident_mb()
np.ones(25_000_000)
kept_mb = resident_mb() - before
release_freed_memory()
print(freed, kept, kept_mb, resident_mb() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ("faults_if_freed", "faults_if_kept", "kept_mb", "released_mb")
    return dict(zip(names, map(int, done.stdout.split()), strict=True))


def test_an_older_glibc_keeps_less_memory(monkeypatch) -> None:
    limits = {}

    def mallopt(parameter: int, size: int) -> int:
        """Of an older glibc: no threshold beyond 32 MiB."""
        if parameter == -3 and size > 2**25:
            return 0
        limits[parameter] = size
        return 1

    monkeypatch.setattr(hardware, "_glibc", {"mallopt": mallopt}.get)
    hardware.keep_freed_memory()
    assert limits == {-3: 2**25, -1: 2**29}


def test_freed_memory_is_used_again(memory: dict[str, int]) -> None:
    assert memory["faults_if_kept"] < 0.5 * memory["faults_if_freed"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone can")
def test_freed_memory_that_was_kept_goes_back_to_the_system(memory: dict[str, int]) -> None:
    assert memory["kept_mb"] > 150  # of 200
    assert memory["released_mb"] < 50


def test_cores_are_those_of_the_process_or_else_of_the_machine(monkeypatch):
    assert hardware.num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert hardware.num_cores() == os.cpu_count()


def test_without_cuda_tensors_are_moved():
    tensor = torch.ones(3)
    assert DeviceCopies()({"image": tensor}, torch.device("cpu"))["image"] is tensor
    assert DeviceCopies()({"image": tensor}, torch.device("meta"))["image"].is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_queued_later_reads_complete_copies():
    device = torch.device("cuda", torch.cuda.current_device())
    copies = DeviceCopies()
    total = torch.zeros((), device=device)
    for number in range(20):
        image = torch.full((2**24,), float(number)).pin_memory()
        total += copies({"image": image}, device)["image"].double().mean()
    assert float(total) == sum(range(20))
