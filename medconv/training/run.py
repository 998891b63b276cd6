"""One training run: prepares data, resolves the config, builds and fits, and keeps `summary.json`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf

from medconv import config as configs
from medconv.config import Values
from medconv.models.build import model_of
from medconv.models.monai_networks import stem_for
from medconv.models.pretrained.adapt import layers_of
from medconv.models.pretrained.load import load as load_pretrained
from medconv.performance import bottleneck
from medconv.performance.step_profiler import StepProfiler
from medconv.targets import Targets
from medconv.training import report
from medconv.training.autotune import cache
from medconv.training.build import build_task, record_of
from medconv.training.callbacks import early_stopping
from medconv.training.checkpoint.compatibility import (
    check_has_training_state,
    check_same_freezing,
    check_same_optimizer,
    check_same_task,
    check_weights_fit,
)
from medconv.training.data_setup import PreparedData, build_data, derived_values, prepare_data
from medconv.training.memory_errors import naming_memory
from medconv.training.run_dir import RunDir, is_rank_zero
from medconv.training.trainer import build_trainer
from medconv.utils import checkpoint_io, cluster, signals
from medconv.utils.exit_codes import DONE
from medconv.utils.hardware import apply_backends, check_devices, resolve_precision

_LONG_ENOUGH = 10.0  # seconds of training; the bottleneck of a shorter run means little

log = logging.getLogger(__name__)


def train(config: DictConfig, folder: RunDir) -> Values:
    """Trains the run of a composed config. Returns: the content of `summary.json`.

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


def _train(config: DictConfig, folder: RunDir) -> Values:
    if config.seed < 0:
        raise configs.ConfigError(f"seed must be 0 or more, got {config.seed}")
    L.seed_everything(config.seed, workers=True, verbose=False)
    config = _with_launched_devices(config)
    prepared = prepare_data(config, memory_gb=folder.planned_memory())
    config = _with_loss(config, prepared.targets)
    values = _resolve(config, prepared, folder)
    if folder.finished(values):
        log.info("this run is finished; run.resume=never trains it again")
        return folder.summary()
    stop_request = signals.StopRequest()
    first_weights = _first_weights(config, values, folder)
    apply_backends(values["perf"])
    task = build_task(values, record_of(values, prepared), prepared.store, first_weights)
    profiler = StepProfiler(values["perf"]["profile"], folder.begun)
    trainer = build_trainer(values, folder, profiler, bool(prepared.val), stop_request)
    data = build_data(values, prepared, profiler, stop_request)
    report.announce(
        values, prepared.dataset.name, len(prepared.train), len(prepared.val), task.network, trainer, folder
    )
    if folder.resume not in ("auto", "never"):
        _check_checkpoint(folder.resume, values, task)
    folder.begin(values)
    folder.write_summary(
        skipped_cases=prepared.skipped,
        score=prepared.targets.monitored.plain(),
        targets=prepared.targets.plain(),
    )
    with (
        folder.recording(trainer, profiler),
        cluster.detecting_lost_peers(trainer.world_size > 1),
        naming_memory(values["data"]),
    ):
        with stop_request.noted():
            trainer.fit(task, data, ckpt_path=folder.resume_from(), weights_only=True)
        folder.write_summary(stopped_early=early_stopping.ended(trainer))
    if profiler.training_seconds > _LONG_ENOUGH:
        verdict = bottleneck.verdict(profiler.shares(), values, len(os.sched_getaffinity(0)))
        folder.write_summary(verdict=verdict)
    if is_rank_zero():
        report.hyperparameters(trainer, values, folder)
    return folder.summary()


def _resolve(config: DictConfig, prepared: PreparedData, folder: RunDir) -> Values:
    """The config with every value filled in."""
    values = configs.resolve(config, _derived(prepared))
    values["model"] = model_of(values)
    values["data"]["batch_size"] = prepared.plan.batch_size
    values["trainer"]["devices"] = check_devices(values["trainer"], cluster.launcher() is not None)
    values["trainer"]["precision"] = resolve_precision(config.trainer.precision, config.trainer.accelerator)
    return cache.settle(values, folder)


def _check_checkpoint(path: str, values: Values, task: L.LightningModule) -> None:
    """Raises: ValueError: the checkpoint of `run.resume` does not fit this run."""
    content, setting = checkpoint_io.read(Path(path)), f"run.resume={path}"
    check_has_training_state(content, setting)
    check_same_task(content, values["derived"], setting)
    check_same_freezing(content, values["init"], setting)
    check_weights_fit(task, content, setting)
    check_same_optimizer(content, str(values["optimizer"].get("_target_")), setting)


def _first_weights(config: DictConfig, values: Values, folder: RunDir) -> Callable[..., Any] | None:
    """Loads the weights of `init.pretrained` into a network. None: random ones, or those of a resumed run."""
    init, derived = values["init"], values["derived"]
    if init["pretrained"] is None or folder.resume_from() is not None:
        return None
    # layers whose size changes with the number of channels or classes are the first and the last ones
    more = (
        configs.resolve(config, {**derived, key: derived[key] + 1}) for key in ("num_channels", "num_classes")
    )
    layers = layers_of(values["model"], *map(model_of, more))
    return partial(
        load_pretrained,
        path=Path(init["pretrained"]),
        derived=derived,
        layers=layers,
        inflate_2d=init["inflate_2d"],
    )


def _derived(prepared: PreparedData) -> Values:
    """The config's `derived`: values of the data and its plan, with those that follow from the targets."""
    derived, monitored = derived_values(prepared), prepared.targets.monitored
    return {
        **derived,
        "monitor": monitored.name,
        "monitor_mode": monitored.mode,
        "num_train_cases": len(prepared.train),
        "stem": stem_for(derived["patch_size"]),
    }


def _with_loss(config: DictConfig, targets: Targets) -> DictConfig:
    """The config with the targets' default loss for `loss=auto`."""
    if config.loss._target_ is not None:
        return config
    config = config.copy()
    config.loss = OmegaConf.load(configs.conf_dir() / "loss" / f"{targets.default_loss}.yaml")
    return config


def _with_launched_devices(config: DictConfig) -> DictConfig:
    """The config with the number of machines and devices that the run was launched with."""
    config = config.copy()
    config.trainer.num_nodes, config.trainer.devices = cluster.processes(
        config.trainer.num_nodes, config.trainer.devices
    )
    return config
