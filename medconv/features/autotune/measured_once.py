"""Measurements of this machine that are made once: rank 0 measures and writes a file.

The other ranks read it, and so do later runs on the same hardware.
"""

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

import medconv
from medconv.config import ConfigError, Node, RunConfig
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
    begin: Callable[[], None] = lambda: None,
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
    others_wait = shared and _has_other_ranks(config)
    if others_wait or holds(result):
        _write(result, path, name, others_wait)
    return result, path


def _has_other_ranks(config: RunConfig) -> bool:
    return config.trainer.devices not in (None, 1, "1") or config.trainer.num_nodes not in (None, 1)


@contextmanager
def measuring(config: RunConfig) -> Iterator[None]:
    """For steps that are measured before a run, with the flags of torch's backends that it trains with."""
    trainer = config.trainer
    with (
        hardware.measuring(trainer.accelerator, trainer.devices, _backends(config)),
        hardware.kept_random_state(trainer.accelerator),
    ):
        yield


def _backends(config: RunConfig) -> hardware.Backends:
    trainer = config.trainer
    return hardware.Backends(
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
