"""The only assembly: everything a config names is built here, and read back from a checkpoint here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from medconv import checkpoint, performance, tuning
from medconv import config as configs
from medconv.building import Values, build_network, build_optimizer, test_time_axes
from medconv.callbacks import EndWithValidation, ProgressBar, ProgressLines, TimeBudget, checkpoints
from medconv.config import ConfigError
from medconv.convs import fold_convs
from medconv.data import layout
from medconv.data.case import Case, Dataset
from medconv.data.datamodule import DataModule
from medconv.data.prepare import dataset_folder, fingerprint, prepare
from medconv.data.preprocess import Recipe, normalisation_for, restore
from medconv.data.store import Store
from medconv.inference import SlidingWindow
from medconv.layers import swap_pools
from medconv.loggers import CsvLogger
from medconv.performance import parallel
from medconv.performance.hardware import uses_gpu
from medconv.planning import Plan, plan
from medconv.runfolder import RunFolder, is_rank_zero

_SWITCHES = ("channels_last", "fast_norm", "fast_depthwise", "checkpointing", "compile", "cuda_graphs")
_WORTH_A_WORD = 10.0  # seconds of training; what a shorter one waits for says little
_DEFAULT_EPOCHS = 100  # where none of trainer.max_time, max_epochs and max_steps is given

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A dataset ready to train on."""

    dataset: Dataset
    train: list[Case]
    val: list[Case]
    recipe: Recipe
    plan: Plan
    store: Store


@dataclass(frozen=True)
class Trained:
    """A network as a checkpoint holds it, folded, in evaluation mode, with what its input must look like."""

    network: nn.Module
    recipe: Recipe
    window: SlidingWindow
    class_names: tuple[str, ...]
    modalities: tuple[str, ...]
    precision: str
    memory_format: torch.memory_format


def train(config: DictConfig, folder: RunFolder) -> Values:
    """One training job, from a composed config to a filled run folder; returns the summary.

    Raises: ValueError: the user's data or configuration is at fault.
    """
    L.seed_everything(config.seed, workers=True, verbose=False)
    prepared = prepare_data(config)
    values = configs.resolved(config, facts(prepared))
    values["trainer"]["devices"] = performance.check_devices(values["trainer"])
    values["trainer"]["precision"] = performance.resolve_precision(config.trainer.precision, config.trainer.accelerator)
    values = tuning.settle(values, folder)
    if folder.finished(values):
        log.info("this run is finished; run.resume=never trains it anew")
        return folder.summary()
    trainer, task, data, profiler = assemble(values, prepared, folder)
    folder.begin(values)
    with folder.recording(trainer, profiler), _naming_memory():
        trainer.fit(task, data, ckpt_path=folder.resume_from(), weights_only=True)
    if profiler.training_seconds > _WORTH_A_WORD:
        verdict = performance.verdict(profiler.shares(), values, len(os.sched_getaffinity(0)))
        folder.write_summary(verdict=verdict)
    if is_rank_zero():
        _log_hyperparameters(trainer, values, folder)
    return folder.summary()


def prepare_data(config: DictConfig) -> Prepared:
    """Find, check, plan and prepare the dataset; what was done before is not done again."""
    data = config.data
    dataset: Dataset = configs.build(OmegaConf.to_container(data.layout, resolve=True), "data.layout")  # type: ignore[arg-type]
    train, val = layout.split(dataset.cases, data.fold, data.num_folds, Path(data.splits) if data.splits else None)
    workers = len(os.sched_getaffinity(0)) if data.prepare_workers is None else data.prepare_workers
    if workers < 1:
        raise ConfigError(f"data.prepare_workers must be at least 1, got {workers}")
    home = dataset_folder(Path(data.cache), dataset)
    found = fingerprint(dataset, home, workers)
    planned = plan(found, data.spacing_mm, data.patch_size)
    names = normalisation_for(data.normalisation, dataset.modalities)
    recipe = Recipe(found.spatial_dims, planned.spacing_mm, names, found.intensities)
    return Prepared(dataset, train, val, recipe, planned, prepare(dataset, recipe, home, workers))


def facts(prepared: Prepared) -> Values:
    """What a config may refer to as `${facts.…}`: known only once the data is prepared and planned."""
    planned = {key: _plain(value) for key, value in asdict(prepared.plan).items()}
    first = [1] * prepared.recipe.spatial_dims
    return {
        "spatial_dims": prepared.recipe.spatial_dims,
        "num_channels": len(prepared.dataset.modalities),
        "num_classes": len(prepared.dataset.class_names),
        "class_names": list(prepared.dataset.class_names),
        **planned,
        "stage_strides": [first, *planned["strides"]],
    }


def assemble(values: Values, prepared: Prepared, folder: RunFolder) -> tuple[L.Trainer, Any, DataModule, Any]:
    """Trainer, task, data and step timer of a resolved config."""
    known, perf = values["facts"], values["perf"]
    network = build_network(values, known["patch_size"], pretrained=values["init"]["pretrained"])
    performance.apply_backends(perf)
    performance.apply_switches(network, **{key: perf[key] for key in _SWITCHES})
    if values["trainer"]["deterministic"]:
        swap_pools(network)
    task = configs.build(
        values["task"],
        "task",
        network=network,
        loss=configs.build(values["loss"], "loss"),
        optimizer=build_optimizer(values),
        scheduler=configs.naming("scheduler", configs.build(values["scheduler"], "scheduler")),
        class_names=prepared.dataset.class_names,
        patch_size=known["patch_size"],
        to_native=lambda logits, case: restore(logits, prepared.store.placement(case)),
        record=_record(values, prepared),
        memory_format=performance.memory_format(perf["channels_last"], known["spatial_dims"]),
        mirror_axes=test_time_axes(values, network),
    )
    profiler = performance.StepProfiler(perf["profile"])
    trainer = _trainer(values, folder, profiler, bool(prepared.val))
    data = _data(values, prepared)
    _announce(values, prepared, network, trainer, folder)
    return trainer, task, data, profiler


def load(path: Path, trusted: Sequence[str] = (), device: str = "cpu") -> Trained:
    """Read a checkpoint back: its network, priors folded, and its preprocessing.

    Args: trusted: packages of your own that its network may come from.
    Raises: ValueError: missing, damaged, not medconv's, or naming a class that is not allowed.
    """
    content = checkpoint.read(path)
    record, values = content["medconv"], content["medconv"]["config"]
    build = partial(configs.build_trusted, trusted=trusted)
    network = build_network(values, values["facts"]["patch_size"], build)
    checkpoint.load_weights(network, content, path)
    axes = test_time_axes(values, network)
    network = fold_convs(network).eval()
    channels_last, dims = values["perf"]["channels_last"], values["facts"]["spatial_dims"]
    fast = {key: values["perf"].get(key, False) for key in ("fast_norm", "fast_depthwise")}
    performance.apply_switches(network, channels_last=channels_last, **fast)
    return Trained(
        network.to(device),
        Recipe(**{key: _tuples(value) for key, value in record["recipe"].items()}),
        _window(values, axes),
        tuple(record["class_names"]),
        tuple(record["modalities"]),
        str(values["trainer"]["precision"]),
        performance.memory_format(channels_last, dims),
    )


def _window(values: Values, axes: tuple[int, ...]) -> SlidingWindow:
    task = values["task"]
    return SlidingWindow(tuple(values["facts"]["patch_size"]), task["overlap"], task["window_batch_size"], axes)


def _record(values: Values, prepared: Prepared) -> Values:
    """What every checkpoint carries, plain values only."""
    return {
        "config": values,
        "recipe": {key: _plain(value) for key, value in asdict(prepared.recipe).items()},
        "class_names": list(prepared.dataset.class_names),
        "modalities": list(prepared.dataset.modalities),
        "validation": {},
    }


def _trainer(values: Values, folder: RunFolder, profiler: Any, validates: bool) -> L.Trainer:
    settings, perf = dict(values["trainer"]), values["perf"]
    max_time = settings.pop("max_time")
    accumulates = any("Accumulation" in str(node.get("_target_")) for node in values["callbacks"].values())
    settings["strategy"] = parallel.strategy(settings, perf, accumulates)
    settings["benchmark"] = performance.benchmark_kernels(
        settings["benchmark"], settings["accelerator"], settings["deterministic"]
    )
    callbacks = [*checkpoints(folder.checkpoints, validates), profiler, parallel.SameBuffers(), parallel.WholeWeights()]
    if perf["profile"]:
        callbacks.append(performance.Trace(folder.path / "tensorboard" / "trace"))
    if max_time is not None:
        callbacks.append(TimeBudget(configs.seconds(max_time, "trainer.max_time")))
    callbacks.append(EndWithValidation())
    if settings["enable_progress_bar"]:
        rate = 20 if uses_gpu(settings["accelerator"]) else 1  # the bar reads the loss, for which a GPU is waited for
        callbacks.append(ProgressBar(refresh_rate=rate) if sys.stderr.isatty() else ProgressLines())
        settings["enable_progress_bar"] = sys.stderr.isatty()
    callbacks += [configs.build(node, f"callbacks.{name}") for name, node in values["callbacks"].items()]
    loggers = [configs.build(node, f"logger.{name}", save_dir=str(folder.path)) for name, node in values["logger"].items()]
    if settings["max_epochs"] is None:
        bounded = max_time is not None or settings["max_steps"] != -1
        settings["max_epochs"] = -1 if bounded else _DEFAULT_EPOCHS
    trainer = L.Trainer(
        **settings,
        callbacks=callbacks,
        logger=[*loggers, CsvLogger(folder.path / "metrics.csv")],
        default_root_dir=folder.path,
        use_distributed_sampler=False,
    )
    parallel.AgreedStop(trainer, perf["agree_every"]).install()
    return trainer


def _data(values: Values, prepared: Prepared) -> DataModule:
    settings, known = values["data"], values["facts"]
    augment = configs.build(values["augment"], "augment", seed=values["seed"], spacing_mm=known["spacing_mm"])
    keys = ("batch_size", "samples_per_epoch", "foreground_share", "num_workers", "prefetch_factor", "persistent_workers")
    return DataModule(
        prepared.store,
        prepared.train,
        prepared.val,
        known["patch_size"],
        augment,
        seed=values["seed"],
        **{key: settings[key] for key in keys},
    )


def _announce(values: Values, prepared: Prepared, network: nn.Module, trainer: L.Trainer, folder: RunFolder) -> None:
    """What is about to happen, in a few lines."""
    known, data = values["facts"], values["data"]
    batch = data["batch_size"] * trainer.world_size * trainer.accumulate_grad_batches
    weights = sum(p.numel() for p in network.parameters())
    log.info("data: %s, %d cases to train on, %d to validate", prepared.dataset.name, len(prepared.train), len(prepared.val))
    log.info("patch: %s voxels of %s mm, global batch %d", _by(known["patch_size"]), _by(known["spacing_mm"]), batch)
    log.info("model: %s, %.2f million parameters", values["model"]["_target_"], weights / 1e6)
    log.info("trainer: %d x %s, precision %s", trainer.world_size, trainer.strategy.root_device.type, trainer.precision)
    log.info("run: %s", folder.path)
    for line in performance.without_effect(values["perf"], values["trainer"]):
        log.warning("%s", line)


@contextmanager
def _naming_memory() -> Iterator[None]:
    """Turns running out of memory into words about what helps. Raises: ConfigError."""
    try:
        yield
    except RuntimeError as error:
        advice = performance.memory_advice(error)
        if advice is None:
            raise
        raise ConfigError(f"{advice} ({str(error).strip().splitlines()[0]})") from error


def _log_hyperparameters(trainer: L.Trainer, values: Values, folder: RunFolder) -> None:
    """TensorBoard's hparams page: choices, with the final metric."""
    groups = {k: v for k, v in values.items() if k in ("data", "model", "conv", "optimizer", "scheduler", "perf", "seed")}
    params = {k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in configs.flat(groups).items()}
    final = folder.summary().get("val/dice")
    for logger in trainer.loggers:
        if isinstance(logger, L.pytorch.loggers.TensorBoardLogger):
            logger.log_hyperparams(params, {"hparams/val_dice": final} if final is not None else {})
            logger.finalize("success")


def _plain(value: Any) -> Any:
    """Tuples to lists, all the way down: what YAML and `weights_only` loading hold."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _by(numbers: Sequence[float]) -> str:
    return " x ".join(f"{n:g}" for n in numbers)
