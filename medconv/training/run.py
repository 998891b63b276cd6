"""One training run: prepares data, resolves the config, builds and fits, and keeps `summary.json`."""

import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import OmegaConf

from medconv import config as configs
from medconv.config import Node, RunConfig
from medconv.data.loading.datamodule import DataModule
from medconv.models.build import check_conv, model_of
from medconv.models.pretrained.adapt import layers_of
from medconv.models.pretrained.load import load as load_pretrained
from medconv.performance import bottleneck
from medconv.performance.step_profiler import StepProfiler
from medconv.targets import Targets
from medconv.training import report, test_stage
from medconv.training.autotune import cache
from medconv.training.build import build_task, has_progress, record_of
from medconv.training.callbacks import early_stopping
from medconv.training.checkpoint.compatibility import (
    check_has_training_state,
    check_not_finished,
    check_same_freezing,
    check_same_optimizer,
    check_same_task,
    check_weights_fit,
)
from medconv.training.data_setup import PreparedData, build_data, prepare_data
from medconv.training.memory_errors import naming_memory
from medconv.training.run_dir import RunDir, is_rank_zero
from medconv.training.task import Task
from medconv.training.trainer import build_trainer
from medconv.utils import checkpoint_io, cluster, signals
from medconv.utils.exit_codes import DONE
from medconv.utils.hardware import apply_backends, check_devices, resolve_precision

_LONG_ENOUGH = 10.0  # seconds of training; the bottleneck of a shorter run means little

log = logging.getLogger(__name__)


def train(config: RunConfig, folder: RunDir) -> Node:
    """Trains the run of a checked config. Returns: the content of `summary.json`.

    Raises: ValueError: the user's data or configuration is wrong. RunInterrupted: a signal stopped the run.
    """
    try:
        with signals.raising(), closing(folder), cluster.sharing_errors(folder.path):
            return _train(config, folder)
    except signals.RunInterrupted as stopped:
        if stopped.number == signal.SIGUSR1 and is_rank_zero():
            signals.requeue()
        if stopped.agreed and not is_rank_zero() and cluster.launcher() is None:
            # Lightning kills the first process if one that it started ends with an error
            raise SystemExit(DONE) from None
        raise


def _train(config: RunConfig, folder: RunDir) -> Node:
    if config.seed < 0:
        raise configs.ConfigError(f"seed must be 0 or more, got {config.seed}")
    if (steps := config.trainer.accumulate_grad_batches) < 1:
        raise configs.ConfigError(f"trainer.accumulate_grad_batches must be at least 1, got {steps}")
    if config.perf.cuda_graphs and steps > 1:
        raise configs.ConfigError(
            f"perf.cuda_graphs=true: gradients lie in the graph's memory, which its next run overwrites, so "
            f"trainer.accumulate_grad_batches must be 1, got {steps}"
        )
    if config.trainer.deterministic:  # read once, by the first matrix product, such as one of a measurement
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    check_conv(config.conv)
    L.seed_everything(config.seed, workers=True, verbose=False)
    config = with_devices(config)
    prepared = prepare_data(config, recorded=folder.planned())
    config = _with_loss(config, prepared.targets)
    resolved = resolve(config, prepared, folder)
    if config.test:
        test_stage.check(prepared)
    finished = folder.finished(resolved)
    if finished and (not config.test or test_stage.done(folder)):
        log.info("this run is finished; run.resume=never trains it again")
        return folder.summary()
    stop_request = signals.StopRequest()
    first_weights = _first_weights(config, resolved, folder)
    apply_backends(resolved.perf.matmul_precision)
    task = build_task(resolved, record_of(resolved, prepared), prepared.store, first_weights)
    profiler = StepProfiler(resolved.perf.profile, folder.begun)
    trainer = build_trainer(resolved, folder, profiler, bool(prepared.val), stop_request)
    data = build_data(resolved, prepared, profiler, stop_request)
    report.announce(
        resolved, prepared.dataset.name, len(prepared.train), len(prepared.val), task.network, trainer, folder
    )
    if folder.resume not in ("auto", "never"):
        _check_checkpoint(folder.resume, resolved, task, trainer)
    if not finished:
        _fit(trainer, task, data, resolved, prepared, profiler, folder, stop_request)
    if resolved.test:
        test_stage.score(trainer, task, data, folder)
    return folder.summary()


def _fit(
    trainer: L.Trainer,
    task: Task,
    data: DataModule,
    resolved: RunConfig,
    prepared: PreparedData,
    profiler: StepProfiler,
    folder: RunDir,
    stop_request: signals.StopRequest,
) -> None:
    folder.begin(resolved)
    folder.write_summary(
        skipped_cases=prepared.skipped,
        score=prepared.targets.monitored.plain(),
        targets=prepared.targets.plain(),
    )
    with (
        folder.recording(trainer, profiler),
        cluster.detecting_lost_peers(trainer.world_size > 1),
        naming_memory(resolved.data),
    ):
        if is_rank_zero() and folder.resume_from() is None:
            report.config_text(trainer, resolved)
        with stop_request.noted():
            trainer.fit(task, data, ckpt_path=folder.resume_from(), weights_only=True)
        folder.write_summary(stopped_early=early_stopping.ended(trainer))
    if profiler.training_seconds > _LONG_ENOUGH:
        verdict = bottleneck.verdict(profiler.shares(), resolved, len(os.sched_getaffinity(0)))
        folder.write_summary(verdict=verdict)
    if is_rank_zero():
        report.hyperparameters(trainer, resolved, folder)


def resolve(config: RunConfig, prepared: PreparedData, folder: RunDir) -> RunConfig:
    """The config with every value filled in."""
    resolved = configs.resolve(config, prepared.derived())
    resolved = replace(
        resolved,
        model=model_of(resolved.model, prepared.targets.per_voxel),
        data=replace(resolved.data, batch_size=prepared.plan.batch_size),
    )
    return cache.settle(resolved, folder)


def _check_checkpoint(path: str, config: RunConfig, task: L.LightningModule, trainer: L.Trainer) -> None:
    """Raises: ValueError: the checkpoint of `run.resume` does not fit this run."""
    content, setting = checkpoint_io.read(Path(path)), f"run.resume={path}"
    check_has_training_state(content, setting)
    check_same_task(content, config.derived, setting)
    check_same_freezing(content, config.init, setting)
    check_weights_fit(task, content, setting)
    check_same_optimizer(content, config, setting, new_lr=has_progress(config))
    limits = (trainer.max_steps, trainer.max_epochs or -1, config.trainer.max_seconds)
    check_not_finished(content, *limits, setting)


def _first_weights(config: RunConfig, resolved: RunConfig, folder: RunDir) -> Callable[..., Any] | None:
    """Loads the weights of `init.pretrained` into a network. None: random ones, or those of a resumed run."""
    init, derived = resolved.init, resolved.derived
    if init.pretrained is None or folder.resume_from() is not None:
        return None
    # layers whose size changes with the number of channels or classes are the first and the last ones
    more_channels = configs.resolve(config, replace(derived, num_channels=derived.num_channels + 1))
    more_outputs = configs.resolve(config, replace(derived, num_classes=derived.num_classes + 1))
    models = [model_of(changed.model, derived.per_voxel) for changed in (more_channels, more_outputs)]
    layers = layers_of(resolved.model, *models)
    return partial(
        load_pretrained,
        path=Path(init.pretrained),
        derived=derived,
        layers=layers,
        inflate_2d=init.inflate_2d,
    )


def _with_loss(config: RunConfig, targets: Targets) -> RunConfig:
    """The config with the targets' default loss for `loss=auto`."""
    if config.loss.get("_target_") is not None:
        return config
    path = configs.conf_dir() / "loss" / f"{targets.default_loss}.yaml"
    loss: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    more = {key: value for key, value in config.loss.items() if key != "_target_"}
    return replace(config, loss={**loss, **more})


def with_devices(config: RunConfig) -> RunConfig:
    """The config with the number of machines and devices that the run was launched with, and its precision.

    Raises: ValueError: this machine lacks the devices, or they lack the precision.
    """
    trainer = config.trainer
    num_nodes, devices = cluster.processes(trainer.num_nodes, trainer.devices)
    devices = check_devices(devices, trainer.accelerator, cluster.launcher() is not None)
    precision = resolve_precision(trainer.precision, trainer.accelerator)
    return replace(
        config, trainer=replace(trainer, num_nodes=num_nodes, devices=devices, precision=precision)
    )
