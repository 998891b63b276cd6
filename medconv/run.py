"""The only assembly: everything a config names is built here. The way back from a checkpoint is `trained`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from omegaconf import DictConfig

from medconv import (
    checkpoint,
    commands,
    goals,
    performance,
    pretrained,
    reports,
    resuming,
    sides,
    signals,
    stopping,
    tuning,
)
from medconv import config as configs
from medconv.building import (
    Values,
    build_network,
    build_optimizer,
    fitted_loss,
    model_of,
    outcome_of,
    test_time_axes,
    training_axes,
)
from medconv.callbacks import EndWithValidation, ProgressBar, ProgressLines, TimeBudget
from medconv.convs import mirror_axes
from medconv.data.datamodule import DataModule
from medconv.data.preprocess import restore
from medconv.dataset import Prepared, data_module, facts, prepare_data
from medconv.layers import swap_pools
from medconv.loggers import CsvLogger
from medconv.networks import stem_for
from medconv.nonfinite import FiniteGuard
from medconv.optimizers import with_factors
from medconv.performance import cluster, parallel
from medconv.performance.hardware import uses_gpu
from medconv.runfolder import RunFolder, is_rank_zero
from medconv.saving import AtomicIO, Checkpoints
from medconv.trained import Trained as Trained
from medconv.trained import load as load

_SWITCHES = ("channels_last", "fast_norm", "fast_depthwise", "checkpointing", "compile", "cuda_graphs")
_WORTH_A_WORD = 10.0  # seconds of training; what a shorter one waits for says little
_DEFAULT_EPOCHS = 100  # where none of trainer.max_time, max_epochs and max_steps is given

log = logging.getLogger(__name__)


def train(config: DictConfig, folder: RunFolder) -> Values:
    """One training job, from a composed config to a filled run folder; returns the summary.

    Raises: ValueError: the user's data or configuration is at fault. signals.Stopped: it was told to stop, and did.
    """
    try:
        with signals.raising(), closing(folder), cluster.blaming(folder.path):
            return _train(config, folder)
    except signals.Stopped as stopped:
        if stopped.number == signal.SIGUSR1 and is_rank_zero():
            signals.requeue()
        if stopped.agreed and not is_rank_zero() and cluster.launcher() is None:
            raise SystemExit(commands.DONE) from None  # Lightning kills the first where one it started ends with an error
        raise


def _train(config: DictConfig, folder: RunFolder) -> Values:
    if config.seed < 0:
        raise configs.ConfigError(f"seed must be 0 or more, got {config.seed}")
    L.seed_everything(config.seed, workers=True, verbose=False)
    config = _launched(config)
    prepared = prepare_data(config, memory_gb=folder.planned_memory())
    values = configs.resolved(config, _facts(config, prepared))
    values["model"] = model_of(values)
    values["data"]["batch_size"] = prepared.plan.batch_size
    values["trainer"]["devices"] = performance.check_devices(values["trainer"], cluster.launcher() is not None)
    values["trainer"]["precision"] = performance.resolve_precision(config.trainer.precision, config.trainer.accelerator)
    values = tuning.settle(values, folder)
    if folder.finished(values):
        log.info("this run is finished; run.resume=never trains it anew")
        return folder.summary()
    asked = signals.Asked()
    trainer, task, data, profiler = assemble(values, prepared, folder, asked, _first_weights(config, values, folder))
    if folder.resume not in ("auto", "never"):
        content, given = checkpoint.read(Path(folder.resume)), f"run.resume={folder.resume}"
        checkpoint.need_state(content, given)
        checkpoint.need_alike(content, values["facts"], given)
        checkpoint.need_same_learning(content, values["init"], given)
        checkpoint.need_fit(task, content, given)
        checkpoint.need_optimizer(content, str(values["optimizer"].get("_target_")), given)
    folder.begin(values)
    folder.write_summary(skipped_cases=prepared.skipped, score=goals.of_task(values["task"]["_target_"]).plain())
    with (
        folder.recording(trainer, profiler),
        cluster.naming_lost(trainer.world_size > 1),
        performance.naming_memory(values["data"]),
    ):
        with asked.noted():
            trainer.fit(task, data, ckpt_path=folder.resume_from(), weights_only=True)
        folder.write_summary(stopped_early=stopping.ended(trainer))
    if profiler.training_seconds > _WORTH_A_WORD:
        verdict = performance.verdict(profiler.shares(), values, len(os.sched_getaffinity(0)))
        folder.write_summary(verdict=verdict)
    if is_rank_zero():
        reports.hyperparameters(trainer, values, folder)
    return folder.summary()


def _first_weights(config: DictConfig, values: Values, folder: RunFolder) -> Callable[..., Any] | None:
    """What puts them into the network; None where they stay as drawn, or are those of a checkpoint to go on from."""
    init, known = values["init"], values["facts"]
    if init["pretrained"] is None or folder.resume_from() is not None:
        return None
    more = (configs.resolved(config, {**known, key: known[key] + 1}) for key in ("num_channels", "num_classes"))
    layers = pretrained.layers_of(values["model"], *map(model_of, more))
    return partial(pretrained.load, path=Path(init["pretrained"]), facts=known, layers=layers, to_3d=init["to_3d"])


def _facts(config: DictConfig, prepared: Prepared) -> Values:
    """`facts`, with what follows from them and the task for losses, networks, stopping and schedules to refer to."""
    found, goal = facts(prepared), goals.of_task(str(config.task._target_))
    return {
        **found,
        "score": goal.name,
        "score_mode": goal.mode,
        "num_train_cases": len(prepared.train),
        "stem": stem_for(found["patch_size"]),
    }


def _launched(config: DictConfig) -> DictConfig:
    """The config with the numbers of machines and devices that the run has."""
    config = config.copy()
    config.trainer.num_nodes, config.trainer.devices = cluster.processes(config.trainer.num_nodes, config.trainer.devices)
    return config


def assemble(
    values: Values, prepared: Prepared, folder: RunFolder, asked: signals.Asked, load: Callable[..., Any] | None = None
) -> tuple[L.Trainer, Any, DataModule, Any]:
    """Trainer, task, data and step timer of a resolved config.

    Args: asked: what the training looks at to stop. load: puts first weights into the network.
    """
    known, perf, init = values["facts"], values["perf"], values["init"]
    network = build_network(values, known["patch_size"], load=load)
    if init["freeze"]:
        log.info("%s stay as they are", pretrained.freeze(network, init["freeze"]))
    factors = init["lr_factors"] or {}
    pretrained.check_factors(factors, network)
    sides.warn_of_lookalikes(known, training_axes(values), mirror_axes(network))
    performance.apply_backends(perf)
    performance.apply_switches(network, **{key: perf[key] for key in _SWITCHES})
    if values["trainer"]["deterministic"]:
        swap_pools(network)
    task = configs.build(
        values["task"],
        "task",
        network=network,
        loss=fitted_loss(configs.build(values["loss"], "loss"), known),
        optimizer=with_factors(build_optimizer(values), network, factors),
        scheduler=configs.naming("scheduler", configs.build(values["scheduler"], "scheduler")),
        record=_record(values, prepared),
        memory_format=performance.memory_format(perf["channels_last"], known["spatial_dims"]),
        mirror_axes=test_time_axes(values, network),
        **_asked(values, prepared),
    )
    profiler = performance.StepProfiler(perf["profile"], folder.begun)
    trainer = _trainer(values, folder, profiler, bool(prepared.val), asked)
    data = data_module(values, prepared)
    data.stopped = lambda: asked.number != 0
    reports.announce(values, prepared.dataset.name, len(prepared.train), len(prepared.val), network, trainer, folder)
    return trainer, task, data, profiler


def _asked(values: Values, prepared: Prepared) -> Values:
    """What a task is told of what the network is asked for."""
    known, outcome = values["facts"], outcome_of(values["facts"])
    if outcome is not None:
        return {"outcome": outcome, "spatial_dims": known["spatial_dims"], "seed": values["seed"]}
    return {
        "targets": prepared.targets,
        "patch_size": known["patch_size"],
        "to_native": lambda logits, case: restore(logits, prepared.store.placement(case), prepared.targets.decode),
        "slice_axis": known["slice_axis"],
        "label_pairs": configs.tuples(known["label_pairs"] or []),
    }


def _record(values: Values, prepared: Prepared) -> Values:
    """What every checkpoint carries, plain values only."""
    return {
        "config": values,
        "recipe": {key: configs.plain(value) for key, value in asdict(prepared.recipe).items()},
        "dataset": prepared.dataset.name,
        "class_names": list(prepared.dataset.class_names),
        "targets": values["facts"]["targets"],
        "outcome": values["facts"]["outcome"],
        "modalities": list(prepared.dataset.modalities),
        "spacing_range_mm": configs.plain(prepared.spacing_range_mm),
        "validation": {},
    }


def _averaging(values: Values) -> list[L.Callback]:
    """Before whatever looks at the weights of a validation."""
    if "_target_" not in values["averaging"]:
        return []
    if values["trainer"]["strategy"] == "fsdp":
        log.info("averaging: not with trainer.strategy=fsdp, whose ranks have no whole weights; the last ones are used")
        return []
    return [configs.build(values["averaging"], "averaging")]


def _watching(values: Values, validates: bool) -> list[L.Callback]:
    """What looks at each validation's scores."""
    waits = "scheduler=plateau" if str(values["scheduler"].get("_target_")).endswith("plateau") else ""
    stops = values["stopping"] if "_target_" in values["stopping"] else {}
    if not (validates and values["trainer"]["limit_val_batches"] != 0) and (waits or stops):
        raise configs.ConfigError(f"{waits or 'stopping=patience'} looks at validations, and there are no cases to validate")
    return [stopping.Plateau(), *([configs.build(stops, "stopping")] if stops else [])]


def _trainer(values: Values, folder: RunFolder, profiler: Any, validates: bool, asked: signals.Asked) -> L.Trainer:
    settings, perf = dict(values["trainer"]), values["perf"]
    max_time = settings.pop("max_time")
    accumulates = any("Accumulation" in str(node.get("_target_")) for node in values["callbacks"].values())
    settings["strategy"] = parallel.strategy(settings, perf, accumulates)
    settings["benchmark"] = performance.benchmark_kernels(
        settings["benchmark"], settings["accelerator"], settings["deterministic"]
    )
    guard = FiniteGuard(folder.path / "nonfinite", values["run"]["on_nonfinite"], values["run"]["max_skipped"])
    writer = AtomicIO()
    every = configs.seconds(values["run"]["checkpoint_every"], "run.checkpoint_every")
    keeper = Checkpoints(folder.checkpoints, writer, every)
    callbacks = [keeper, resuming.DrawsByNumber(values["seed"]), profiler, guard, *_averaging(values)]
    callbacks += [cluster.SameStart(), parallel.SameBuffers(), parallel.WholeWeights()]
    if perf["profile"]:
        callbacks.append(performance.Trace(folder.path / "tensorboard" / "trace"))
    if max_time is not None:
        callbacks.append(TimeBudget(configs.seconds(max_time, "trainer.max_time")))
    callbacks += [*_watching(values, validates), EndWithValidation()]
    if settings["enable_progress_bar"]:
        rate = 20 if uses_gpu(settings["accelerator"]) else 1  # the bar reads the loss, for which a GPU is waited for
        callbacks.append(ProgressBar(refresh_rate=rate) if sys.stderr.isatty() else ProgressLines())
        settings["enable_progress_bar"] = sys.stderr.isatty()
    callbacks += [configs.build(node, f"callbacks.{name}") for name, node in values["callbacks"].items()]
    loggers = [configs.build(node, f"logger.{name}", save_dir=str(folder.path)) for name, node in values["logger"].items()]
    agreement = parallel.AgreedStop(perf["agree_every"])
    leaving = resuming.LeavesValidation(asked, agreement)
    if settings["max_epochs"] is None:
        bounded = max_time is not None or settings["max_steps"] != -1
        settings["max_epochs"] = -1 if bounded else _DEFAULT_EPOCHS
    trainer = L.Trainer(
        **settings,
        callbacks=[*callbacks, leaving],
        plugins=[plugin for plugin in (cluster.environment(), writer) if plugin is not None],
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),  # ours is none of Lightning's
        logger=[*loggers, CsvLogger(folder.path / "metrics.csv")],
        default_root_dir=folder.path,
        use_distributed_sampler=False,
    )
    agreement.device = trainer.strategy.root_device if trainer.world_size > 1 else None
    resuming.install(trainer, keeper, asked, agreement)
    return trainer
