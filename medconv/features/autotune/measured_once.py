"""Measurements of this machine that are made once: rank 0 measures and writes a file.

The other ranks read it, and so do later runs on the same hardware.
"""

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import medconv
from medconv.config import ConfigError, Node, RunConfig
from medconv.training.distributed import processes
from medconv.training.run_dir import short_hash
from medconv.utils import cluster, hardware
from medconv.utils.atomic_io import write_text

_PATIENCE = 600  # seconds that the other ranks wait for rank 0's measurement

log = logging.getLogger(__name__)


def measured_once(
    config: RunConfig,
    name: str,
    key: Node,
    measure: Callable[[], Node],
    complete: Callable[[Node], bool],
    begin: Callable[[], Any] = lambda: None,
    shared: bool = True,
    holds: Callable[[Node], bool] = lambda result: True,
) -> tuple[Node, Path]:
    """The result of `measure`, or of an earlier run with the same key, and its file.

    Args:
        config: of the run.
        name: of the measurement: of its files' folder under `data.cache_dir`, and in messages.
        key: all that the result depends on beside hardware and versions.
        measure: returns plain values.
        complete: whether the content of a file is a result.
        begin: called before on each rank that finds no result; its errors must be those of all ranks.
        shared: all ranks ask for it; else rank 0 alone does.
        holds: whether a result counts for later runs, too; one that does not is not written, unless other
            ranks wait for it.
    Raises:
        ConfigError: the file of several ranks cannot be written, or waiting for rank 0 timed out.
    """
    uses_gpu = hardware.uses_gpu(config.trainer.accelerator)
    device = torch.cuda.get_device_name() if uses_gpu else torch.cpu.get_capabilities().get("cpu_name")
    machine = {
        "hardware": [device or platform.processor(), platform.machine(), torch.get_num_threads()],
        "backends": asdict(_backends(config)),
        "versions": [torch.__version__, medconv.__version__],
    }
    key = {**machine, **key}
    path = Path(config.data.cache_dir) / name / f"{short_hash(key)}.json"
    result = _read(path, name, complete)
    if result is not None:
        return result, path
    begin()
    if not cluster.is_first():
        return _wait_for(path, name, complete), path
    result = {**measure(), "key": key}
    others_wait = shared and processes(config.trainer) > 1
    if others_wait or holds(result):
        _write(result, path, name, others_wait)
    return result, path


@dataclass(frozen=True)
class Backends:
    """Flags of torch's backends, as a training sets them; None leaves one as it is.

    Args:
        matmul_precision: as in `set_matmul_precision`.
        benchmark: whether cuDNN tries its algorithms; see `benchmark_kernels`.
        deterministic: whether algorithms are deterministic; or `warn`, where there are none.
    """

    matmul_precision: str
    benchmark: bool | None
    deterministic: Any = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the flags are set; then they are what they were before."""
        cudnn = torch.backends.cudnn
        precision = torch.get_float32_matmul_precision()
        allow_tf32 = cudnn.allow_tf32
        benchmark = cudnn.benchmark
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            hardware.set_matmul_precision(self.matmul_precision)
            if self.benchmark is not None:
                cudnn.benchmark = self.benchmark
            if self.deterministic is not None:
                torch.use_deterministic_algorithms(
                    bool(self.deterministic), warn_only=self.deterministic == "warn"
                )
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32 = allow_tf32
            cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)


@contextmanager
def kept_random_state(accelerator: str) -> Iterator[None]:
    """Afterwards torch's random numbers go on as before, on the GPU of this process too if there is one."""
    with torch.random.fork_rng([torch.cuda.current_device()] if hardware.uses_gpu(accelerator) else []):
        yield


@contextmanager
def measuring(config: RunConfig) -> Iterator[None]:
    """For steps that are measured before a run, with the flags of torch's backends that it trains with.

    On the first GPU of the run. Its own peak is counted anew, and NCCL, which takes its memory beside torch,
    finds it free.
    """
    devices = config.trainer.devices
    gpu = hardware.uses_gpu(config.trainer.accelerator)
    if gpu:
        torch.cuda.set_device(int(devices[0]) if isinstance(devices, list) and devices else 0)
    with _backends(config).applied(), kept_random_state(config.trainer.accelerator):
        yield
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()


def _backends(config: RunConfig) -> Backends:
    trainer = config.trainer
    return Backends(
        matmul_precision=config.perf.matmul_precision,
        benchmark=hardware.benchmark_kernels(trainer.benchmark, trainer.accelerator, trainer.deterministic),
        deterministic=trainer.deterministic,
    )


def _read(path: Path, name: str, complete: Callable[[Node], bool]) -> Node | None:
    """An earlier result; None if there is none or the file is unreadable."""
    if not path.is_file():
        return None
    try:
        result: Node = json.loads(path.read_text())
        if complete(result):
            return result
    except (ValueError, KeyError, TypeError):
        pass
    log.warning("%s: %s cannot be read, so it is measured again", name, path)
    if cluster.is_first():
        path.unlink(missing_ok=True)
    return None


def _write(result: Node, path: Path, name: str, others_wait: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        if others_wait:
            raise ConfigError(f"{name}: cannot tell the other ranks: data.cache_dir: {error}") from error
        log.warning("%s: the result cannot be kept for later runs: %s", name, error)


def _wait_for(path: Path, name: str, complete: Callable[[Node], bool]) -> Node:
    """The result that rank 0 writes."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        result = _read(path, name, complete)
        if result is not None:
            return result
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{name}: rank 0's measurement did not come to {path} within {_PATIENCE} seconds; "
                "data.cache_dir must be a folder that all ranks share, and their hardware alike"
            )
        time.sleep(0.2)
