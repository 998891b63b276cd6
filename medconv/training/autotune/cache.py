"""`perf=autotune` in a run: which settings are open, which rank measures, and how choices are cached.

A setting is open if it is null in the config. The choice is measured once for the same network and shapes; a
resumed run keeps the values in its `config.yaml`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from omegaconf import OmegaConf

from medconv import config as configs
from medconv.config import Node, RunConfig, TrainerConfig
from medconv.models.deep_supervision import Supervised
from medconv.training.autotune import search
from medconv.training.autotune.trial import Choice, Work
from medconv.training.build import build_task
from medconv.training.measured_once import measured_once
from medconv.training.run_dir import RunDir
from medconv.utils import hardware

OPEN = (
    "perf.channels_last",
    "perf.fast_norm",
    "perf.activation_checkpointing",
    "perf.compile",
    "trainer.precision",
)
_LENGTH = ("max_time", "max_steps", "max_epochs", "limit_train_batches")  # in `trainer`: a run's length
_REPAID = 1800  # seconds; compiling is tried only for runs at least as long

log = logging.getLogger(__name__)


def settle(config: RunConfig, folder: RunDir) -> RunConfig:
    """The same config, with a choice for each of OPEN that is null, and for the batch if that is asked for.

    Raises: ConfigError: nothing fits into memory, or waiting for rank 0's choice timed out.
    """
    unsettled = [key for key in OPEN if _get(config, key) is None]
    if not unsettled and not config.perf.auto_batch_size:
        return config
    earlier = folder.path / "config.yaml"
    if folder.resume != "never" and folder.has_own() and earlier.is_file():
        return _with(config, _recorded(OmegaConf.to_container(OmegaConf.load(earlier)), config, unsettled))
    result, path = measured_once(config, "autotune", _key(config), lambda: _measured(config), _complete)
    log.info("perf=autotune: %s (%s)", _describe(result), path)
    return _with(config, result["choice"])


def _complete(result: Node) -> bool:
    return set(OPEN) <= set(result["choice"])


def _measured(config: RunConfig) -> dict[str, Any]:
    """Measure, log the results, and return choice and table as plain values."""
    perf, gpu = config.perf, hardware.uses_gpu(config.trainer.accelerator)
    if not perf.auto_seconds > 0:
        raise configs.ConfigError(f"perf.auto_seconds must be positive, got {perf.auto_seconds}")
    log.info("perf=autotune: measuring steps for up to %.0f seconds", perf.auto_seconds)
    batches = config.data.samples_per_epoch / (config.data.batch_size or 1)
    with hardware.measuring(config.trainer.accelerator, config.trainer.devices), torch.random.fork_rng():
        work = _work(config, torch.device("cuda" if gpu else "cpu"))
        fixed = {key.split(".")[1]: _get(config, key) for key in (*OPEN, "perf.fast_depthwise")}
        candidates = search.measure(
            work,
            search.choices(fixed, work.network, gpu),
            perf.auto_seconds,
            try_checkpointing=fixed["activation_checkpointing"] is None,
            try_compile=lambda seconds: (
                fixed["compile"] is None and _planned_seconds(config.trainer, batches, seconds) >= _REPAID
            ),
            try_batch_size=perf.auto_batch_size,
        )
    log.info("%s", table(candidates))
    best = candidates[0]
    if math.isinf(best.per_sample):
        raise configs.ConfigError(
            "perf=autotune: no candidate runs, fits into memory and gives the right loss; perf=fast says "
            "more, a smaller "
            f"data.batch_size or data.patch_size may help\n{table(candidates)}"
        )
    choice = {key: getattr(best.choice, key.split(".")[1]) for key in OPEN}
    if perf.auto_batch_size:
        choice["data.batch_size"] = best.batch_size
    return {"choice": choice, "rows": [candidate.row() for candidate in candidates]}


def table(candidates: Sequence[search.Candidate]) -> str:
    """The candidates as text, the chosen one first, then by speed."""
    width = max(len(str(candidate.choice)) for candidate in candidates)
    lines = [f"  {'':{width}}  batch  seconds a step"]
    for candidate in candidates:
        speed = candidate.remark or f"{candidate.per_sample * candidate.batch_size:.3f}"
        memory = f"  {candidate.memory_bytes / 2**30:.1f} GiB" if candidate.memory_bytes else ""
        lines.append(f"  {candidate.choice!s:{width}}  {candidate.batch_size:5}  {speed}{memory}")
    return "\n".join(["perf=autotune takes the first of these", *lines])


def _work(config: RunConfig, device: torch.device) -> Work:
    """The run's own network, loss, optimizer and shapes, with random images and labels."""
    derived, batch = config.derived, config.data.batch_size or 1
    plain = {f"perf.{key}": value for key, value in asdict(Choice()).items() if key != "precision"}
    task = build_task(_with(config, {**plain, "perf.cuda_graphs": False}), {})
    loss, patch = task.loss.to(device), derived.patch_size
    image = torch.randn(batch, derived.num_channels, *patch, device=device)
    label = task.targets.encode(task.targets.random_labels(batch, patch).to(device))
    network = task.network if task.supervision is None else Supervised(task.network, task.supervision)
    return Work(network, loss, task.make_optimizer, image, label)


def _planned_seconds(trainer: TrainerConfig, batches: float, step: float) -> float:
    """How long the run will take if a batch takes `step` seconds. Args: batches: in an epoch."""
    limits = [step * trainer.max_steps * trainer.accumulate_grad_batches] if trainer.max_steps > 0 else []
    if trainer.max_seconds is not None:
        limits.append(trainer.max_seconds)
    if trainer.max_epochs not in (None, -1):
        limit = trainer.limit_train_batches
        if limit is not None:  # Lightning's: a number of batches, or a share of them
            batches = min(batches, limit) if isinstance(limit, int) else batches * limit
        limits.append(step * trainer.max_epochs * batches)
    return min(limits, default=math.inf)


def _key(config: RunConfig) -> Node:
    """What a measurement depends on beside hardware and versions: network, shapes, open settings."""
    values, derived = config.plain(), config.derived
    return {
        "values": {key: values[key] for key in ("model", "conv", "loss", "optimizer", "perf")},
        "precision": config.trainer.precision,
        "shape": [config.data.batch_size, derived.num_channels, *derived.patch_size],
        "freeze": config.init.freeze,
        "classes": derived.num_classes,
        "deep_supervision": config.task.deep_supervision,
        "samples_per_epoch": config.data.samples_per_epoch,
        "trainer": [values["trainer"][key] for key in (*_LENGTH, "deterministic", "devices")],
    }


def _recorded(earlier: Any, config: RunConfig, unsettled: Sequence[str]) -> Node:
    keys = [*unsettled, *(["data.batch_size"] if config.perf.auto_batch_size else [])]
    return {key: configs.flatten(earlier).get(key) for key in keys}


def _describe(result: dict[str, Any]) -> str:
    return str(Choice(**{key.split(".")[1]: value for key, value in result["choice"].items() if key in OPEN}))


def _get(config: RunConfig, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _with(config: RunConfig, choice: Node) -> RunConfig:
    for key, value in choice.items():
        group, name = key.split(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config
