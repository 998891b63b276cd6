"""The only assembly: everything a config names is built here. The way back from a checkpoint is `trained`."""

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
from omegaconf import DictConfig

from medconv import config as configs
from medconv.config import Values
from medconv.inference.load import LoadedModel as LoadedModel
from medconv.inference.load import load as load
from medconv.models.build import model_of
from medconv.models.monai_networks import stem_for
from medconv.models.pretrained import load as models_load
from medconv.models.pretrained.adapt import layers_of
from medconv.performance import bottleneck
from medconv.targets import monitor
from medconv.training import report
from medconv.training.autotune import cache
from medconv.training.build import assemble
from medconv.training.callbacks import early_stopping
from medconv.training.checkpoint.compatibility import (
    check_has_training_state,
    check_same_freezing,
    check_same_optimizer,
    check_same_task,
    check_weights_fit,
)
from medconv.training.data_setup import PreparedData, derived, prepare_data
from medconv.training.memory_errors import naming_memory
from medconv.training.run_dir import RunDir, is_rank_zero
from medconv.utils import checkpoint_io, cluster, signals
from medconv.utils.exit_codes import DONE
from medconv.utils.hardware import check_devices, resolve_precision

_WORTH_A_WORD = 10.0  # seconds of training; what a shorter one waits for says little

log = logging.getLogger(__name__)


def train(config: DictConfig, folder: RunDir) -> Values:
    """One training job, from a composed config to a filled run folder; returns the summary.

    Raises: ValueError: the user's data or configuration is at fault. signals.RunInterrupted: it was told to
    stop, and did.
    """
    try:
        with signals.raising(), closing(folder), cluster.sharing_errors(folder.path):
            return _train(config, folder)
    except signals.RunInterrupted as stopped:
        if stopped.number == signal.SIGUSR1 and is_rank_zero():
            signals.requeue()
        if stopped.agreed and not is_rank_zero() and cluster.launcher() is None:
            raise SystemExit(
                DONE
            ) from None  # Lightning kills the first where one it started ends with an error
        raise


def _train(config: DictConfig, folder: RunDir) -> Values:
    if config.seed < 0:
        raise configs.ConfigError(f"seed must be 0 or more, got {config.seed}")
    L.seed_everything(config.seed, workers=True, verbose=False)
    config = _launched(config)
    prepared = prepare_data(config, memory_gb=folder.planned_memory())
    values = configs.resolve(config, _facts(config, prepared))
    values["model"] = model_of(values)
    values["data"]["batch_size"] = prepared.plan.batch_size
    values["trainer"]["devices"] = check_devices(values["trainer"], cluster.launcher() is not None)
    values["trainer"]["precision"] = resolve_precision(config.trainer.precision, config.trainer.accelerator)
    values = cache.settle(values, folder)
    if folder.finished(values):
        log.info("this run is finished; run.resume=never trains it anew")
        return folder.summary()
    asked = signals.StopRequest()
    trainer, task, data, profiler = assemble(
        values, prepared, folder, asked, _first_weights(config, values, folder)
    )
    if folder.resume not in ("auto", "never"):
        content, given = checkpoint_io.read(Path(folder.resume)), f"run.resume={folder.resume}"
        check_has_training_state(content, given)
        check_same_task(content, values["derived"], given)
        check_same_freezing(content, values["init"], given)
        check_weights_fit(task, content, given)
        check_same_optimizer(content, str(values["optimizer"].get("_target_")), given)
    folder.begin(values)
    folder.write_summary(
        skipped_cases=prepared.skipped, score=monitor.metric_of_task(values["task"]["_target_"]).plain()
    )
    with (
        folder.recording(trainer, profiler),
        cluster.detecting_lost_peers(trainer.world_size > 1),
        naming_memory(values["data"]),
    ):
        with asked.noted():
            trainer.fit(task, data, ckpt_path=folder.resume_from(), weights_only=True)
        folder.write_summary(stopped_early=early_stopping.ended(trainer))
    if profiler.training_seconds > _WORTH_A_WORD:
        verdict = bottleneck.verdict(profiler.shares(), values, len(os.sched_getaffinity(0)))
        folder.write_summary(verdict=verdict)
    if is_rank_zero():
        report.hyperparameters(trainer, values, folder)
    return folder.summary()


def _first_weights(config: DictConfig, values: Values, folder: RunDir) -> Callable[..., Any] | None:
    """What puts them into the network; None where they stay as drawn, or are those of a checkpoint to go
    on from.
    """
    init, known = values["init"], values["derived"]
    if init["pretrained"] is None or folder.resume_from() is not None:
        return None
    more = (
        configs.resolve(config, {**known, key: known[key] + 1}) for key in ("num_channels", "num_classes")
    )
    layers = layers_of(values["model"], *map(model_of, more))
    return partial(
        models_load.load,
        path=Path(init["pretrained"]),
        derived=known,
        layers=layers,
        inflate_2d=init["inflate_2d"],
    )


def _facts(config: DictConfig, prepared: PreparedData) -> Values:
    """`derived`, with what follows from them and the task for losses, networks, stopping and schedules to
    refer to.
    """
    found, goal = derived(prepared), monitor.metric_of_task(str(config.task._target_))
    return {
        **found,
        "monitor": goal.name,
        "monitor_mode": goal.mode,
        "num_train_cases": len(prepared.train),
        "stem": stem_for(found["patch_size"]),
    }


def _launched(config: DictConfig) -> DictConfig:
    """The config with the numbers of machines and devices that the run has."""
    config = config.copy()
    config.trainer.num_nodes, config.trainer.devices = cluster.processes(
        config.trainer.num_nodes, config.trainer.devices
    )
    return config
