"""Builds the trainer of a run: callbacks, strategy, loggers, and the loop that resumes exactly."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from inspect import isclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Checkpoint,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks import ProgressBar as LightningsBar

from medconv import config as configs
from medconv import doors
from medconv.config import ConfigError, Node, RunConfig, TrainerConfig
from medconv.config.instantiate import built, class_of
from medconv.performance.step_profiler import StepProfiler
from medconv.performance.trace import Trace
from medconv.planning.limits import need_size
from medconv.training import distributed
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.callbacks.progress import ProgressBar, ProgressLines
from medconv.training.callbacks.thaw import Thaw
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.callbacks.validated import FollowScores
from medconv.training.callbacks.weight_averaging import AverageWeights
from medconv.training.checkpoint import resumable_loop
from medconv.training.checkpoint.resumable_loop import FinalValidation
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter
from medconv.training.data_setup import PreparedData
from medconv.training.distributed import (
    BroadcastBuffers,
    ResumeStepCheck,
    UnshardForValidation,
    cluster_environment,
)
from medconv.training.loggers import CsvLogger
from medconv.training.optim.build import schedule_class
from medconv.training.run_dir import RunDir
from medconv.utils.hardware import benchmark_kernels
from medconv.utils.progress import in_terminal
from medconv.utils.signals import StopRequest

log = logging.getLogger(__name__)

# If none of trainer.max_time, max_epochs and max_steps is set.
_DEFAULT_EPOCHS = 100


def build_trainer(
    config: RunConfig,
    folder: RunDir,
    profiler: StepProfiler,
    prepared: PreparedData,
    stop_request: StopRequest,
) -> L.Trainer:
    """The trainer with its callbacks and loggers.

    Raises:
        ConfigError: an object cannot be built from its node, or a value is out of range.
    """
    interval = configs.duration_seconds(config.run.checkpoint_interval, "run.checkpoint_interval")
    checkpoints = CheckpointWriter(folder.checkpoints, AtomicCheckpointIO(), interval)
    stops = distributed.StopSync(stop_request, config.perf.stop_sync_interval)
    max_seconds = config.trainer.max_seconds
    budget = None
    samples = (config.data.global_batch_size or 1) * config.trainer.accumulate_grad_batches  # of a step
    validates = bool(prepared.val)
    if max_seconds is not None:
        # A member of an ensemble shares its time already
        in_ensemble = folder.path.parent.name == "members" or (folder.path / "members").is_dir()
        budget = TimeBudget(
            max_seconds,
            # Fine-tuning needs fewer steps than a size does
            None if config.init.pretrained else need_size(config.derived.size),
            # The number that the user sets holds
            validates_all=config.trainer.limit_val_batches is not None,
            views=None if in_ensemble else lambda steps: prepared.views(steps * samples),
        )
    callbacks = _callbacks(config, folder, checkpoints, profiler, stops, budget, validates)
    settings = _settings(config, callbacks, validates)
    user_plugins = settings.pop("plugins") or []
    loggers = [
        configs.build(node, f"logger.{name}", save_dir=str(folder.path))
        for name, node in config.logger.items()
    ]
    return resumable_loop.ResumableTrainer(
        checkpoints,
        stops,
        postpones=None if budget is None else budget.postpones_validation,
        **settings,
        callbacks=callbacks,
        plugins=[
            plugin for plugin in (cluster_environment(), checkpoints.io, *user_plugins) if plugin is not None
        ],
        # CheckpointWriter is not one of Lightning's; a user's callback may be
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        logger=[*loggers, CsvLogger(folder.path / "metrics.csv")],
        default_root_dir=folder.path,
        # `SampleOrder` divides the samples among the ranks
        use_distributed_sampler=False,
    )


def _settings(config: RunConfig, callbacks: Sequence[L.Callback], validates: bool) -> dict[str, Any]:
    """Arguments of Lightning's trainer, from `trainer` of the config."""
    trainer = config.trainer
    settings = asdict(trainer)
    for key, value in settings.items():
        if isinstance(value, (dict, list)):
            settings[key] = built(value, f"trainer.{key}")
    del settings["max_time"]  # `TimeBudget` ends a run on time
    left = distributed.batches_per_epoch(config) % trainer.accumulate_grad_batches
    if left:  # only by a limit: an epoch is whole steps
        log.warning(
            "trainer.accumulate_grad_batches=%d: trainer.limit_train_batches=%s leaves %d for the last "
            "step of an epoch, whose gradients are smaller; a multiple of %d leaves none",
            trainer.accumulate_grad_batches,
            trainer.limit_train_batches,
            left,
            trainer.accumulate_grad_batches,
        )
    accumulates = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    if accumulates and epochs_of(trainer) is not None:
        raise ConfigError(
            "callbacks: GradientAccumulationScheduler changes how many steps an epoch has, so the number of "
            "epochs does not say when the learning rate ends; set trainer.max_steps or max_time"
        )
    if accumulates and config.perf.cuda_graphs:
        raise ConfigError(
            "callbacks: GradientAccumulationScheduler keeps gradients, which lie in the memory of CUDA "
            "graphs, whose next run overwrites them; set perf.cuda_graphs=false"
        )
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        raise ConfigError(
            "callbacks: StochasticWeightAveraging replaces the schedule, by which patches grow; "
            "weight_averaging=polynomial averages weights"
        )
    settings["strategy"] = distributed.strategy_of(trainer, config.perf, accumulates) or settings["strategy"]
    settings["benchmark"] = benchmark_kernels(trainer.benchmark, trainer.accelerator, trainer.deterministic)
    # ProgressBar is not one of Lightning's; a user's callback may be
    settings["enable_progress_bar"] &= any(isinstance(callback, LightningsBar) for callback in callbacks)
    if not validates:
        # Else Lightning warns of an empty loader
        settings["limit_val_batches"] = 0
    if settings["min_steps"] is not None and settings["min_epochs"] is None:
        settings["min_epochs"] = 0  # else Lightning demands an epoch, here any number of samples
    if trainer.max_epochs is None:
        settings["max_epochs"] = epochs_of(trainer) or -1
        if settings["max_epochs"] != -1:
            log.info(
                "length: %d epochs of %d samples; trainer.max_time, max_steps or max_epochs sets another",
                _DEFAULT_EPOCHS,
                config.data.samples_per_epoch,
            )
    return settings


def epochs_of(trainer: TrainerConfig) -> int | None:
    """The epochs after which a run ends; None: a time or a number of steps ends it."""
    if trainer.max_time is not None or trainer.max_steps != -1 or trainer.max_epochs == -1:
        return None
    return _DEFAULT_EPOCHS if trainer.max_epochs is None else trainer.max_epochs


def _callbacks(
    config: RunConfig,
    folder: RunDir,
    checkpoints: CheckpointWriter,
    profiler: StepProfiler,
    stops: distributed.StopSync,
    budget: TimeBudget | None,
    validates: bool,
) -> list[L.Callback]:
    """All callbacks in the order in which Lightning calls them; it puts a user's ModelCheckpoint last."""
    init = config.init
    averaging: list[L.Callback] = []
    if "_target_" in config.weight_averaging and config.trainer.strategy == "fsdp":
        log.info(
            "weight_averaging is skipped: under trainer.strategy=fsdp no rank has the full weights; the last "
            "weights are used"
        )
    elif "_target_" in config.weight_averaging:
        averaging = [configs.build(config.weight_averaging, "weight_averaging")]
    users = _users_callbacks(config.callbacks, folder)
    progress: list[L.Callback] = []
    if config.trainer.enable_progress_bar:
        # Under a bar, lines are for train.log
        progress = [ProgressLines(budget, level=logging.DEBUG if in_terminal() else logging.INFO)]
        brings_bar = any(isinstance(callback, LightningsBar) for callback in users)
        if in_terminal() and not brings_bar:
            progress = [ProgressBar(checkpoints, budget), *progress]
    trainer = config.trainer
    is_alone = trainer.devices == 1 and trainer.num_nodes == 1 and trainer.strategy == "auto"
    trace = Trace(folder.path / "tensorboard" / "trace") if config.perf.profile else None
    callbacks: list[L.Callback | None] = [
        # At the end of training it saves before averaging replaces the weights
        checkpoints,
        # Whatever draws random numbers in a step, or keeps their state as the guard does, comes later
        resumable_loop.PerStepSeeding(config.seed),
        # Its marks end the phases of a step, so that the work of those below counts as logging
        profiler,
        # It tells averaging whether the step was skipped
        NonfiniteGuard(
            folder.path / "nonfinite",
            nan_policy=config.run.nan_policy,
            max_skipped_steps=config.run.max_skipped_steps,
            averages=[each for each in (*averaging, *users) if isinstance(each, AverageWeights)],
        ),
        # It drops gradients and sets learning rates, which those below read
        None if init.thaw_at is None else Thaw(init.freeze or (), init.thaw_at),
        # It sets the weights of a validation, which those below read
        *averaging,
        *([] if is_alone else [BroadcastBuffers(), UnshardForValidation(), ResumeStepCheck()]),
        trace,
        # Early stopping has nothing to say about a run whose time is up
        budget,
        *_monitoring(config, validates),
        *progress,
        *users,
        # It validates if any of the others has told the trainer to stop after this batch
        FinalValidation(),
        # It aborts a validation once the others have put the training's weights back
        stops,
    ]
    return [callback for callback in callbacks if callback is not None]


def _users_callbacks(nodes: Node, folder: RunDir) -> list[L.Callback]:
    """A `ModelCheckpoint` without a folder writes to one of its name beside our checkpoints.

    Lightning would write below the folder of the first logger.
    """
    callbacks = []
    for name, node in nodes.items():
        target = class_of(str(node.get("_target_")))
        feature = None if target is not None else doors.missing_feature(str(node.get("_target_")))
        if feature is not None:
            log.info("callbacks.%s has no effect: this installation lacks %s", name, feature)
            continue
        writes_checkpoints = isclass(target) and issubclass(target, ModelCheckpoint)
        if writes_checkpoints and node.get("dirpath") is None:
            node = {**node, "dirpath": str(folder.checkpoints / name)}
        callbacks.append(configs.build(node, f"callbacks.{name}"))
    return callbacks


def _monitoring(config: RunConfig, validates: bool) -> list[L.Callback]:
    """Callbacks that react to the scores of validations."""
    on_plateau = getattr(schedule_class(config.scheduler), "needs_validation", False)
    stops_early = "_target_" in config.early_stopping
    has_validations = validates and config.trainer.limit_val_batches != 0
    if not has_validations and (on_plateau or stops_early):
        setting = "scheduler=plateau" if on_plateau else "early_stopping=patience"
        raise configs.ConfigError(f"{setting} needs validations, but there are no cases to validate")
    callbacks: list[L.Callback] = []
    if on_plateau:
        callbacks.append(FollowScores())
    if stops_early:
        callbacks.append(configs.build(config.early_stopping, "early_stopping"))
    return callbacks
