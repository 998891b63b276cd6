"""`perf=autotune` in a run: measures the keys of `TUNED` that are null.

The choice is measured once for the same machine, network and shapes, by rank 0; a resumed run keeps the
values in its `config.yaml`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from medconv import config as configs
from medconv.config import Node, RunConfig, TrainerConfig
from medconv.config.schema import TUNED
from medconv.features.autotune import search
from medconv.features.autotune.measured_once import measured_once, measuring
from medconv.features.autotune.search import Candidate, choices
from medconv.features.autotune.trial import Choice, Work
from medconv.models.deep_supervision import DeepSupervision
from medconv.training.build import build_task
from medconv.training.distributed import batches_per_epoch
from medconv.training.run_dir import RunDir
from medconv.training.trainer import epochs_of
from medconv.utils import hardware

# Keys of `trainer` that set a run's length.
_LENGTH = ("max_time", "max_steps", "max_epochs", "limit_train_batches")
# Seconds; compiling takes a minute or more, so it is tried only for runs at least as long.
_REPAYS_COMPILING = 1800

log = logging.getLogger(__name__)


def tune(config: RunConfig, folder: RunDir) -> RunConfig:
    """The same config, with a choice for each of TUNED that is null, and for the batch if that is asked for.

    Raises:
        ConfigError: nothing fits into memory, or waiting for rank 0's choice timed out.
    """
    unsettled = [key for key in TUNED if attrgetter(key)(config) is None]
    if folder.resume != "never" and folder.has_own() and (folder.path / "config.yaml").is_file():
        return _with(config, _recorded(folder.earlier_config(), config, unsettled))
    result, path = measured_once(config, "autotune", _key(config), lambda: _measure(config), _complete)
    log.info("perf=autotune: %s (%s)", _describe(result), path)
    return _with(config, result["choice"])


def _complete(result: Node) -> bool:
    return set(TUNED) <= set(result["choice"])


def _measure(config: RunConfig) -> dict[str, Any]:
    """Measure, log the results, and return choice and table as plain values."""
    log.info("perf=autotune: measuring steps for up to %.0f seconds", config.perf.auto_seconds)
    with measuring(config):
        candidates = _time_candidates(config)
    log.info("%s", table(candidates))
    best = candidates[0]
    if math.isinf(best.per_sample):
        raise configs.ConfigError(
            "perf=autotune: no candidate runs, fits into memory and gives the right loss; perf=fast says "
            f"more, a smaller data.batch_size or data.patch_size may help\n{table(candidates)}"
        )
    choice = {key: getattr(best.choice, _name(key)) for key in TUNED}
    if config.perf.auto_batch_size:
        choice["data.batch_size"] = best.batch_size
    return {"choice": choice, "rows": [candidate.row() for candidate in candidates]}


def _time_candidates(config: RunConfig) -> list[Candidate]:
    """The best first."""
    uses_gpu = hardware.uses_gpu(config.trainer.accelerator)
    work = _work(config, torch.device("cuda" if uses_gpu else "cpu"))
    set_by_user = {_name(key): attrgetter(key)(config) for key in (*TUNED, "perf.fast_depthwise")}
    batches = batches_per_epoch(config)

    def try_compile(step_seconds: float) -> bool:
        run_seconds = _planned_seconds(config.trainer, batches, step_seconds)
        return set_by_user["compile"] is None and run_seconds >= _REPAYS_COMPILING

    return search.measure(
        work,
        choices(set_by_user, work.network, uses_gpu),
        config.perf.auto_seconds,
        try_checkpointing=set_by_user["activation_checkpointing"] is None,
        try_compile=try_compile,
        try_batch_size=config.perf.auto_batch_size,
    )


def table(candidates: Sequence[Candidate]) -> str:
    """The candidates as text, the chosen one first, then by speed."""
    width = max(len(str(candidate.choice)) for candidate in candidates)
    lines = ["perf=autotune takes the first of these", f"  {'':{width}}  batch  seconds a step"]
    for candidate in candidates:
        speed = candidate.remark or f"{candidate.per_sample * candidate.batch_size:.3f}"
        memory = f"  {candidate.memory_bytes / 2**30:.1f} GiB" if candidate.memory_bytes else ""
        lines.append(f"  {candidate.choice!s:{width}}  {candidate.batch_size:5}  {speed}{memory}")
    return "\n".join(lines)


def _work(config: RunConfig, device: torch.device) -> Work:
    """The run's own network, loss, optimizer and shapes, with random images and labels."""
    derived = config.derived
    patch_size = derived.patch_size
    batch_size = config.data.batch_size or 1
    plain = {f"perf.{key}": value for key, value in asdict(Choice()).items() if key != "precision"}
    task = build_task(_with(config, {**plain, "perf.cuda_graphs": False}), {})
    loss = task.loss.to(device)
    image = torch.randn(batch_size, derived.num_channels, *patch_size, device=device)
    label = task.targets.random_labels(batch_size, patch_size).to(device)
    network = task.network
    if task.supervision is not None:
        network = _Supervised(task.network, task.supervision)
    return Work(
        network=network,
        objective=loss,
        optimizer=task.make_optimizer,
        image=image,
        label=task.targets.encode(label),
    )


def _planned_seconds(trainer: TrainerConfig, batches: int, step_seconds: float) -> float:
    """How long the run will take if a batch takes `step_seconds`. Args: batches: of an epoch."""
    limits = []
    if trainer.max_steps > 0:
        limits.append(step_seconds * trainer.max_steps * trainer.accumulate_grad_batches)
    if trainer.max_seconds is not None:
        limits.append(trainer.max_seconds)
    epochs = epochs_of(trainer) or trainer.max_epochs  # those of a run without a length are the default
    if epochs is not None and epochs != -1:
        limits.append(step_seconds * epochs * batches)
    return min(limits, default=math.inf)


def _key(config: RunConfig) -> Node:
    """What a measurement depends on beside hardware and versions: network, shapes, open settings."""
    values = config.plain()
    derived = config.derived
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
    """The choice of the run to resume. Args: earlier: its config."""
    keys = list(unsettled)
    if config.perf.auto_batch_size:
        keys.append("data.batch_size")
    values = configs.flatten(earlier)
    return {key: values.get(key) for key in keys}


def _describe(result: dict[str, Any]) -> str:
    choice = {_name(key): value for key, value in result["choice"].items() if key in TUNED}
    return str(Choice(**choice))


def _name(key: str) -> str:
    """The name of a field of `Choice`."""
    return key.split(".")[1]


def _with(config: RunConfig, choice: Node) -> RunConfig:
    for key, value in choice.items():
        group, name = key.split(".")
        changed_group = replace(getattr(config, group), **{name: value})
        config = replace(config, **{group: changed_group})
    return config


class _Supervised(nn.Module):
    """A network with its heads as one module.

    Shape:
        as of `DeepSupervision`, from images alone.
    """

    def __init__(self, network: nn.Module, supervision: DeepSupervision) -> None:
        super().__init__()
        self.network = network
        self.supervision = supervision

    def forward(self, image: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = self.supervision(self.network, image)
        return outputs
