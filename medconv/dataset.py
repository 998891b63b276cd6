"""A config's dataset: found, checked, planned and prepared; what the config may then refer to; and its loaders."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from medconv import commands, reports, sides
from medconv import config as configs
from medconv.building import Values
from medconv.config import ConfigError
from medconv.data import layout
from medconv.data.case import Case, Dataset
from medconv.data.datamodule import DataModule
from medconv.data.prepare import dataset_folder, fingerprint, prepare
from medconv.data.preprocess import Recipe, left_right_axis, normalisation_for
from medconv.data.store import Store
from medconv.planning import Plan, across, plan, slice_axis
from medconv.runfolder import short_hash
from medconv.targets import Targets


@dataclass(frozen=True)
class Prepared:
    """A dataset ready to train on. Args: skipped: the cases that were left out, and why."""

    dataset: Dataset
    train: list[Case]
    val: list[Case]
    recipe: Recipe
    plan: Plan
    store: Store
    targets: Targets
    label_pairs: tuple[tuple[int, int], ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


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
    with commands.stoppable():
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
    with commands.stoppable():
        store = prepare(dataset, recipe, home, workers, verify)
    targets = Targets.of_classes(dataset.class_names)
    return Prepared(dataset, train, val, recipe, planned, store, targets, pairs, skipped)


def facts(prepared: Prepared) -> Values:
    """What a config may refer to as `${facts.…}`: known only once the data is prepared and planned."""
    planned = {key: configs.plain(value) for key, value in asdict(prepared.plan).items()}
    first = [1] * prepared.recipe.spatial_dims
    return {
        "spatial_dims": prepared.recipe.spatial_dims,
        "slice_axis": prepared.recipe.slice_axis,
        "num_channels": len(prepared.dataset.modalities),
        "num_classes": prepared.targets.num_outputs,
        "class_names": list(prepared.dataset.class_names),
        "label_pairs": configs.plain(prepared.label_pairs) or None,
        "train_cases": f"{len(prepared.train)} cases, {short_hash([case.id for case in prepared.train])}",
        **planned,
        "stage_strides": [first, *planned["strides"]],
    }


def data_module(values: Values, prepared: Prepared) -> DataModule:
    """The loaders of a resolved config."""
    settings, known = values["data"], values["facts"]
    augment = configs.build(
        values["augment"],
        "augment",
        seed=values["seed"],
        spacing_mm=known["spacing_mm"],
        patch_size=known["patch_size"],
        label_pairs=configs.tuples(known["label_pairs"] or []),
        left_right_axis=left_right_axis(known["slice_axis"]),
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
