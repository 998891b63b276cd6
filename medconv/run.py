"""The only assembly: everything a config names is built here, and read back from a checkpoint here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from medconv import checkpoint, performance, reports, sides, tuning
from medconv import config as configs
from medconv.building import Values, build_network, build_optimizer, test_time_axes, training_axes
from medconv.callbacks import EndWithValidation, ProgressBar, ProgressLines, TimeBudget, checkpoints
from medconv.config import ConfigError
from medconv.convs import fold_convs, mirror_axes
from medconv.data import layout
from medconv.data.case import Case, Dataset
from medconv.data.datamodule import DataModule
from medconv.data.prepare import dataset_folder, fingerprint, prepare
from medconv.data.preprocess import Recipe, left_right_axis, normalisation_for, restore
from medconv.data.store import Store
from medconv.inference import SlidingWindow
from medconv.layers import swap_pools
from medconv.loggers import CsvLogger
from medconv.performance import parallel
from medconv.performance.hardware import uses_gpu
from medconv.planning import Plan, across, plan, slice_axis
from medconv.runfolder import RunFolder, is_rank_zero

_SWITCHES = ("channels_last", "fast_norm", "fast_depthwise", "checkpointing", "compile", "cuda_graphs")
_WORTH_A_WORD = 10.0  # seconds of training; what a shorter one waits for says little
_DEFAULT_EPOCHS = 100  # where none of trainer.max_time, max_epochs and max_steps is given

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A dataset ready to train on. Args: skipped: the cases that were left out, and why."""

    dataset: Dataset
    train: list[Case]
    val: list[Case]
    recipe: Recipe
    plan: Plan
    store: Store
    label_pairs: tuple[tuple[int, int], ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


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
    folder.write_summary(skipped_cases=prepared.skipped)
    with folder.recording(trainer, profiler), performance.naming_memory(values["data"]):
        trainer.fit(task, data, ckpt_path=folder.resume_from(), weights_only=True)
    if profiler.training_seconds > _WORTH_A_WORD:
        verdict = performance.verdict(profiler.shares(), values, len(os.sched_getaffinity(0)))
        folder.write_summary(verdict=verdict)
    if is_rank_zero():
        reports.hyperparameters(trainer, values, folder)
    return folder.summary()


def find_data(config: DictConfig) -> tuple[Dataset, int]:
    """The dataset that a config names, and how many of its cases may be in work at once."""
    data = config.data
    if data.on_fault not in ("raise", "skip"):
        raise ConfigError(f"data.on_fault must be raise or skip, got {data.on_fault}")
    workers = min(8, len(os.sched_getaffinity(0))) if data.prepare_workers is None else data.prepare_workers
    if workers < 1:
        raise ConfigError(f"data.prepare_workers must be at least 1, got {workers}")
    return configs.build(OmegaConf.to_container(data.layout, resolve=True), "data.layout"), workers  # type: ignore[arg-type]


def prepare_data(config: DictConfig, verify: bool = False) -> Prepared:
    """Find, check, plan and prepare the dataset; what was done before is not done again.

    Args: verify: read every prepared case again and compare its checksums.
    """
    data, (dataset, workers) = config.data, find_data(config)
    parts = layout.split(dataset.cases, data.fold, data.num_folds, Path(data.splits) if data.splits else None)
    pairs = sides.label_pairs(data.label_pairs, dataset.class_names)
    home = dataset_folder(Path(data.cache), dataset)
    found, skipped = fingerprint(dataset, home, workers, skip=data.on_fault == "skip")
    train, val = ([case for case in part if case.id not in skipped] for part in parts)
    if skipped:
        reports.left_out(skipped, len(dataset.cases))
        dataset = replace(dataset, cases=tuple(case for case in dataset.cases if case.id not in skipped))
        if not train:
            raise ConfigError(f"data.fold={data.fold}: no case is left to train on, all of them are faulty")
    axis = slice_axis(found, data.spatial_dims)
    seen = found if axis is None else across(found, axis)
    planned = plan(seen, data.spacing_mm, data.patch_size)
    names = normalisation_for(data.normalisation, dataset.modalities)
    recipe = Recipe(seen.spatial_dims, planned.spacing_mm, names, found.intensities, axis)
    store = prepare(dataset, recipe, home, workers, verify)
    return Prepared(dataset, train, val, recipe, planned, store, pairs, skipped)


def facts(prepared: Prepared) -> Values:
    """What a config may refer to as `${facts.…}`: known only once the data is prepared and planned."""
    planned = {key: _plain(value) for key, value in asdict(prepared.plan).items()}
    first = [1] * prepared.recipe.spatial_dims
    return {
        "spatial_dims": prepared.recipe.spatial_dims,
        "slice_axis": prepared.recipe.slice_axis,
        "num_channels": len(prepared.dataset.modalities),
        "num_classes": len(prepared.dataset.class_names),
        "class_names": list(prepared.dataset.class_names),
        "label_pairs": _plain(prepared.label_pairs) or None,
        **planned,
        "stage_strides": [first, *planned["strides"]],
    }


def assemble(values: Values, prepared: Prepared, folder: RunFolder) -> tuple[L.Trainer, Any, DataModule, Any]:
    """Trainer, task, data and step timer of a resolved config."""
    known, perf = values["facts"], values["perf"]
    network = build_network(values, known["patch_size"], pretrained=values["init"]["pretrained"])
    sides.warn_of_lookalikes(known, training_axes(values), mirror_axes(network))
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
        slice_axis=known["slice_axis"],
        label_pairs=_tuples(known["label_pairs"] or []),
    )
    profiler = performance.StepProfiler(perf["profile"])
    trainer = _trainer(values, folder, profiler, bool(prepared.val))
    data = _data(values, prepared)
    reports.announce(values, prepared.dataset.name, len(prepared.train), len(prepared.val), network, trainer, folder)
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
    task, known = values["task"], values["facts"]
    return SlidingWindow(
        tuple(known["patch_size"]),
        task["overlap"],
        task["window_batch_size"],
        axes,
        known.get("slice_axis"),  # absent in checkpoints of before there was such a thing
        _tuples(known.get("label_pairs") or []),
    )


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
    pairs = {"label_pairs": _tuples(known["label_pairs"] or []), "left_right_axis": left_right_axis(known["slice_axis"])}
    augment = configs.build(
        values["augment"],
        "augment",
        seed=values["seed"],
        spacing_mm=known["spacing_mm"],
        patch_size=known["patch_size"],
        **pairs,
    )
    keys = ("batch_size", "samples_per_epoch", "foreground_share", "num_workers", "prefetch_factor", "persistent_workers")
    return DataModule(
        prepared.store,
        prepared.train,
        prepared.val,
        known["patch_size"],
        augment,
        seed=values["seed"],
        slice_axis=known["slice_axis"],
        **{key: settings[key] for key in keys},
    )


def _plain(value: Any) -> Any:
    """Tuples to lists, all the way down: what YAML and `weights_only` loading hold."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
