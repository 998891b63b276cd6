"""Builds the trainer of a run: callbacks, strategy, loggers, and the loop that resumes exactly."""

from __future__ import annotations

import logging
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from medconv import config as configs
from medconv.config import Values
from medconv.performance.step_profiler import StepProfiler, Trace
from medconv.training.callbacks import early_stopping
from medconv.training.callbacks.final_validation import FinalValidation
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.callbacks.progress import ProgressBar, ProgressLines
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.checkpoint import resumable_loop
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter
from medconv.training.distributed import strategy
from medconv.training.distributed.cluster_environment import environment
from medconv.training.distributed.same_start import ResumeStepCheck
from medconv.training.loggers.csv import CsvLogger
from medconv.training.run_dir import RunDir
from medconv.utils.hardware import benchmark_kernels, uses_gpu
from medconv.utils.signals import StopRequest

log = logging.getLogger(__name__)

_DEFAULT_EPOCHS = 100  # if none of trainer.max_time, max_epochs and max_steps is set


def build_trainer(
    values: Values, folder: RunDir, profiler: StepProfiler, validates: bool, stop_request: StopRequest
) -> L.Trainer:
    """The trainer with its callbacks and loggers.

    Args: validates: whether there are cases to validate. stop_request: of the run's signals.
    """
    perf = values["perf"]
    settings = {key: _built(value, f"trainer.{key}") for key, value in values["trainer"].items()}
    max_time, plugins = settings.pop("max_time"), settings.pop("plugins") or []
    accumulates = any("Accumulation" in str(node.get("_target_")) for node in values["callbacks"].values())
    settings["strategy"] = strategy.strategy(settings, perf, accumulates)
    settings["benchmark"] = benchmark_kernels(
        settings["benchmark"], settings["accelerator"], settings["deterministic"]
    )
    guard = NonfiniteGuard(
        folder.path / "nonfinite", values["run"]["nan_policy"], values["run"]["max_skipped_steps"]
    )
    writer = AtomicCheckpointIO()
    interval = configs.duration_seconds(values["run"]["checkpoint_interval"], "run.checkpoint_interval")
    checkpoints = CheckpointWriter(folder.checkpoints, writer, interval)
    seeding = resumable_loop.PerStepSeeding(values["seed"])
    callbacks = [checkpoints, seeding, profiler, guard, *_averaging(values)]
    callbacks += [ResumeStepCheck(), strategy.BroadcastBuffers(), strategy.UnshardForValidation()]
    if perf["profile"]:
        callbacks.append(Trace(folder.path / "tensorboard" / "trace"))
    if max_time is not None:
        callbacks.append(TimeBudget(configs.duration_seconds(max_time, "trainer.max_time")))
    callbacks += [*_monitoring(values, validates), FinalValidation()]
    if settings["enable_progress_bar"]:
        rate = 20 if uses_gpu(settings["accelerator"]) else 1  # to show the loss, the bar waits for the GPU
        callbacks.append(ProgressBar(refresh_rate=rate) if sys.stderr.isatty() else ProgressLines())
        settings["enable_progress_bar"] = sys.stderr.isatty()
    callbacks += [configs.build(node, f"callbacks.{name}") for name, node in values["callbacks"].items()]
    loggers = [
        configs.build(node, f"logger.{name}", save_dir=str(folder.path))
        for name, node in values["logger"].items()
    ]
    stops = strategy.StopSync(stop_request, perf["stop_sync_interval"])
    if settings["max_epochs"] is None:
        bounded = max_time is not None or settings["max_steps"] != -1
        settings["max_epochs"] = -1 if bounded else _DEFAULT_EPOCHS
    return resumable_loop.ResumableTrainer(
        checkpoints,
        stops,
        **settings,
        callbacks=[*callbacks, stops],
        plugins=[plugin for plugin in (environment(), writer, *plugins) if plugin is not None],
        # CheckpointWriter is not one of Lightning's; a user's callback may be
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        logger=[*loggers, CsvLogger(folder.path / "metrics.csv")],
        default_root_dir=folder.path,
        use_distributed_sampler=False,
    )


def _built(value: Any, key: str) -> Any:
    """The objects that nodes with a `_target_` describe, also in a list; other values unchanged."""
    if isinstance(value, list):
        return [_built(item, f"{key}[{index}]") for index, item in enumerate(value)]
    return configs.build(value, key) if isinstance(value, dict) and "_target_" in value else value


def _averaging(values: Values) -> list[L.Callback]:
    """Weight averaging; it must precede callbacks that read the weights of a validation."""
    if "_target_" not in values["weight_averaging"]:
        return []
    if values["trainer"]["strategy"] == "fsdp":
        log.info(
            "weight_averaging is skipped: under trainer.strategy=fsdp no rank has the full weights; the last "
            "weights are used"
        )
        return []
    return [configs.build(values["weight_averaging"], "weight_averaging")]


def _monitoring(values: Values, validates: bool) -> list[L.Callback]:
    """Callbacks that react to the scores of validations."""
    plateau = "scheduler=plateau" if str(values["scheduler"].get("_target_")).endswith("plateau") else ""
    stopping = values["early_stopping"] if "_target_" in values["early_stopping"] else {}
    if not (validates and values["trainer"]["limit_val_batches"] != 0) and (plateau or stopping):
        raise configs.ConfigError(
            f"{plateau or 'early_stopping=patience'} needs validations, but there are no cases to validate"
        )
    return [early_stopping.Plateau(), *([configs.build(stopping, "early_stopping")] if stopping else [])]
