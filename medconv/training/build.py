"""Builds a run from a resolved config: network, task, data, callbacks and trainer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

from medconv import config as configs
from medconv.config import Values
from medconv.convs import mirror_axes
from medconv.data import left_right
from medconv.data.loading.datamodule import DataModule
from medconv.data.preprocessing.preprocess import restore
from medconv.inference.tta import test_time_axes, training_axes
from medconv.models.build import build_network
from medconv.models.layers.max_pool import swap_pools
from medconv.models.pretrained.freeze import check_factors, freeze
from medconv.performance.step_profiler import StepProfiler, Trace
from medconv.performance.switches import apply_switches, memory_format
from medconv.targets.image_level import image_targets_of
from medconv.training import report
from medconv.training.callbacks import early_stopping
from medconv.training.callbacks.final_validation import FinalValidation
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.callbacks.progress import ProgressBar, ProgressLines
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.checkpoint import resumable_loop
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter
from medconv.training.data_setup import PreparedData, data_module
from medconv.training.distributed import strategy
from medconv.training.distributed.cluster_environment import environment
from medconv.training.distributed.same_start import ResumeStepCheck
from medconv.training.loggers.csv import CsvLogger
from medconv.training.losses.build import fitted_loss
from medconv.training.optim.build import build_optimizer
from medconv.training.optim.param_groups import with_lr_multipliers
from medconv.training.run_dir import RunDir
from medconv.utils import signals
from medconv.utils.hardware import apply_backends, benchmark_kernels, uses_gpu

log = logging.getLogger(__name__)

_SWITCHES = (
    "channels_last",
    "fast_norm",
    "fast_depthwise",
    "activation_checkpointing",
    "compile",
    "cuda_graphs",
)

_DEFAULT_EPOCHS = 100  # if none of trainer.max_time, max_epochs and max_steps is set


def assemble(
    values: Values,
    prepared: PreparedData,
    folder: RunDir,
    stop_request: signals.StopRequest,
    load: Callable[..., Any] | None = None,
) -> tuple[L.Trainer, Any, DataModule, Any]:
    """Trainer, task, data and step profiler of a resolved config.

    Args: stop_request: of the run's signals. load: loads pretrained weights into the network.
    """
    derived, perf = values["derived"], values["perf"]
    network = _network(values, load)
    factors = values["init"]["lr_multipliers"] or {}
    check_factors(factors, network)
    task = configs.build(
        values["task"],
        "task",
        network=network,
        loss=fitted_loss(configs.build(values["loss"], "loss"), derived),
        optimizer=with_lr_multipliers(build_optimizer(values), network, factors),
        scheduler=configs.errors_with_key("scheduler", configs.build(values["scheduler"], "scheduler")),
        record=_record(values, prepared),
        memory_format=memory_format(perf["channels_last"], derived["spatial_dims"]),
        mirror_axes=test_time_axes(values, network),
        **_target_arguments(values, prepared),
    )
    profiler = StepProfiler(perf["profile"], folder.begun)
    trainer = _trainer(values, folder, profiler, bool(prepared.val), stop_request)
    data = data_module(values, prepared)
    data.stopped = lambda: stop_request.number != 0
    report.announce(
        values, prepared.dataset.name, len(prepared.train), len(prepared.val), network, trainer, folder
    )
    return trainer, task, data, profiler


def _network(values: Values, load: Callable[..., Any] | None) -> nn.Module:
    """The network with its switches applied, and its frozen parameters frozen."""
    derived, perf, init = values["derived"], values["perf"], values["init"]
    network = build_network(values, derived["patch_size"], load=load)
    left_right.check_equivariance(derived, mirror_axes(network))
    if init["freeze"]:
        log.info("%s stay as they are", freeze(network, init["freeze"]))
    left_right.warn_of_lookalikes(derived, training_axes(values), mirror_axes(network))
    apply_backends(perf)
    apply_switches(network, **{key: perf[key] for key in _SWITCHES})
    if values["trainer"]["deterministic"]:
        swap_pools(network)
    return network


def _target_arguments(values: Values, prepared: PreparedData) -> Values:
    """Arguments of the task that depend on the kind of targets."""
    derived, image_targets = values["derived"], image_targets_of(values["derived"])
    if image_targets is not None:
        return {
            "image_targets": image_targets,
            "spatial_dims": derived["spatial_dims"],
            "seed": values["seed"],
        }
    return {
        "targets": prepared.targets,
        "patch_size": derived["patch_size"],
        "to_native": lambda logits, case: restore(
            logits, prepared.store.crop_info(case), prepared.targets.decode
        ),
        "slice_axis": derived["slice_axis"],
        "flip_label_pairs": configs.lists_to_tuples(derived["flip_label_pairs"] or []),
    }


def _record(values: Values, prepared: PreparedData) -> Values:
    """What every checkpoint carries; plain values only."""
    return {
        "config": values,
        "preprocessing": {
            key: configs.tuples_to_lists(value) for key, value in asdict(prepared.preprocessing).items()
        },
        "dataset": prepared.dataset.name,
        "class_names": list(prepared.dataset.class_names),
        "targets": values["derived"]["targets"],
        "image_targets": values["derived"]["image_targets"],
        "modalities": list(prepared.dataset.modalities),
        "spacing_range_mm": configs.tuples_to_lists(prepared.spacing_range_mm),
        "validation": {},
    }


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


def _trainer(
    values: Values, folder: RunDir, profiler: Any, validates: bool, stop_request: signals.StopRequest
) -> L.Trainer:
    settings, perf = dict(values["trainer"]), values["perf"]
    max_time = settings.pop("max_time")
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
    stop_sync = strategy.StopSync(perf["stop_sync_interval"])
    stop_validation = resumable_loop.StopDuringValidation(stop_request, stop_sync)
    if settings["max_epochs"] is None:
        bounded = max_time is not None or settings["max_steps"] != -1
        settings["max_epochs"] = -1 if bounded else _DEFAULT_EPOCHS
    trainer = L.Trainer(
        **settings,
        callbacks=[*callbacks, stop_validation],
        plugins=[plugin for plugin in (environment(), writer) if plugin is not None],
        # CheckpointWriter is not one of Lightning's; a user's callback may be
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        logger=[*loggers, CsvLogger(folder.path / "metrics.csv")],
        default_root_dir=folder.path,
        use_distributed_sampler=False,
    )
    stop_sync.device = trainer.strategy.root_device if trainer.world_size > 1 else None
    resumable_loop.install(trainer, checkpoints, stop_request, stop_sync)
    return trainer
