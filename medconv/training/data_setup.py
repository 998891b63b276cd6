"""A config's dataset: found, checked, planned and prepared; what the config may then refer to; and its
loaders.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from medconv import config as configs
from medconv.config import ConfigError, Values
from medconv.data import left_right, splits
from medconv.data.case import Case, Dataset
from medconv.data.io.raster import is_picture
from medconv.data.loading.datamodule import DataModule
from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.data.preprocessing.pipeline import dataset_folder, fingerprint, prepare
from medconv.data.preprocessing.preprocess import PreprocessingConfig, left_right_axis
from medconv.data.preprocessing.store import Store
from medconv.data.splits import DataSplit
from medconv.performance.memory_budget import measured_gb
from medconv.planning.memory_model import Budget
from medconv.planning.overrides import PlanOverrides
from medconv.planning.planner import Plan, plan
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training import report
from medconv.training.run_dir import short_hash
from medconv.training.tasks.check import check_task
from medconv.utils import signals
from medconv.utils.hardware import resolve_precision


@dataclass(frozen=True)
class PreparedData:
    """A dataset ready to train on.

    Args:
        skipped: the cases that were left out, and why.
        spacing_range_mm: smallest and largest spacing of all cases along each axis (right, anterior,
            superior).
        targets: of label maps; without a meaning where there is an outcome.
        outcome: what is asked of whole images; None: label maps. test: cases that training never sees.
    """

    dataset: Dataset
    train: list[Case]
    val: list[Case]
    recipe: PreprocessingConfig
    plan: Plan
    store: Store
    targets: SegmentationTargets
    flip_label_pairs: tuple[tuple[int, int], ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    spacing_range_mm: tuple[tuple[float, float], ...] = ()
    image_targets: ImageLevelTargets | None = None
    test: list[Case] = field(default_factory=list)


def find_data(config: DictConfig) -> tuple[Dataset, int]:
    """The dataset that a config names, and how many of its cases may be in work at once."""
    data = config.data
    if data.on_invalid_case not in ("raise", "skip"):
        raise ConfigError(f"data.on_invalid_case must be raise or skip, got {data.on_invalid_case}")
    workers = min(8, len(os.sched_getaffinity(0))) if data.prepare_workers is None else data.prepare_workers
    if workers < 1:
        raise ConfigError(f"data.prepare_workers must be at least 1, got {workers}")
    dataset = configs.build(OmegaConf.to_container(data.layout, resolve=True), "data.layout")  # type: ignore[arg-type]
    check_task(config.task, dataset.image_targets, dataset.name)
    if dataset.image_targets is not None:
        _check_of_maps(data)
        return dataset, workers
    if any(case.label is not None and is_picture(case.label) for case in dataset.cases) and _high(
        data.ignore_label
    ):
        raise ConfigError(
            f"data.ignore_label={data.ignore_label}: in masks of pictures it must be below 100, as 255 is a "
            "class"
        )
    return dataset.with_targets(data.regions, data.regions_order, data.ignore_label), workers


def _high(value: object) -> bool:
    return type(value) is int and value >= 100


def _check_of_maps(data: DictConfig) -> None:
    """Raises: ConfigError: a key that is about label maps."""
    for key in ("regions", "regions_order", "ignore_label", "flip_label_pairs"):
        if data[key] is not None:
            raise ConfigError(f"data.{key} is about label maps, and the cases of this dataset have values")


def prepare_data(config: DictConfig, verify: bool = False, memory_gb: float | None = None) -> PreparedData:
    """Find, check, plan and prepare the dataset; what was done before is not done again.

    Args:
        verify: read every prepared case again and compare its checksums.
        memory_gb: that a run to be continued was planned for, in place of what this machine has.
    """
    data, (dataset, workers) = config.data, find_data(config)
    divided = divided_cases(dataset, data)
    pairs = left_right.flip_label_pairs(data.flip_label_pairs, dataset.class_names)
    if pairs and dataset.targets.overlapping:
        raise ConfigError(
            "data.flip_label_pairs exchanges classes, and this run has regions instead; one of them must go"
        )
    home = dataset_folder(Path(data.cache_dir), dataset)
    with signals.raising():
        found, skipped = fingerprint(dataset, home, workers, skip=data.on_invalid_case == "skip")
    divided = splits.drop_cases(divided, skipped)
    if skipped:
        report.left_out(skipped, len(dataset.cases))
        dataset = replace(dataset, cases=tuple(case for case in dataset.cases if case.id not in skipped))
        if not divided.train:
            raise ConfigError(f"data.fold={data.fold}: no case is left to train on, all of them are faulty")
    if dataset.image_targets is not None:
        divided = checked_parts(divided, dataset, found, data)
    planned = planned_for(config, dataset, found, memory_gb)
    report.planned(planned)
    axis, names = planned.slice_axis, planned.normalisation
    frame = planned.patch_size if dataset.image_targets else None
    resize = tuple(data.resize) if data.resize else None
    recipe = PreprocessingConfig(
        planned.spatial_dims, planned.spacing_mm, names, found.intensities, axis, frame, resize
    )
    with signals.raising():
        store = prepare(dataset, recipe, home, workers, verify)
    spacings = tuple((min(mm), max(mm)) for mm in zip(*found.spacings_mm, strict=True))
    return PreparedData(
        dataset,
        divided.train,
        divided.val,
        recipe,
        planned,
        store,
        dataset.targets,
        pairs,
        skipped,
        spacings,
        dataset.image_targets,
        divided.test,
    )


def divided_cases(dataset: Dataset, data: DictConfig) -> DataSplit:
    """As the dataset or a fold of it says. Raises: ValueError: as `parts.divide`."""
    return splits.split_cases(
        dataset.cases, data.fold, data.num_folds, Path(data.splits_file) if data.splits_file else None
    )


def checked_parts(divided: DataSplit, dataset: Dataset, found: Fingerprint, data: DictConfig) -> DataSplit:
    """The parts of whole images, without copies.

    Args: found: of all cases of `dataset`. Raises: ValueError: a class without examples, or mixed sizes.
    """
    assert dataset.image_targets is not None
    divided = splits.drop_duplicates(
        divided, dict(zip([case.id for case in dataset.cases], found.contents, strict=True))
    )
    splits.check_examples(divided, dataset.image_targets)
    if data.balanced_sampling and dataset.image_targets.kind == "regression":
        raise ConfigError(
            "data.balanced_sampling=true draws each class equally often, and the cases of this dataset have "
            "numbers"
        )
    if (
        found.spatial_dims == 2
        and data.resize is None
        and data.patch_size is None
        and len(set(found.shapes)) > 1
    ):
        common, _ = Counter(found.shapes).most_common(1)[0]
        case, size = next((c, s) for c, s in zip(dataset.cases, found.shapes, strict=True) if s != common)
        raise ConfigError(
            f"{case.images[0]}: {size[0]} x {size[1]} pixels, while most pictures have {common[0]} x "
            f"{common[1]}; expected one size, or data.resize=[{common[0]},{common[1]}], which scales all of "
            "them to it"
        )
    return divided


def planned_for(
    config: DictConfig, dataset: Dataset, found: Fingerprint, memory_gb: float | None = None
) -> Plan:
    """The plan of a config for a dataset. Args: memory_gb: as in `prepare_data`. Raises: ValueError: as
    `plan`.
    """
    data: Values = OmegaConf.to_container(config.data, resolve=True)  # type: ignore[assignment]
    own: Values = OmegaConf.to_container(config.plan, resolve=True)  # type: ignore[assignment]
    given = own.pop("memory_gb")
    keys = ("spatial_dims", "spacing_mm", "patch_size", "batch_size", "normalisation")
    whole = dataset.image_targets is not None
    overrides = PlanOverrides(**own, **{key: data[key] for key in keys}, resize=data["resize"], whole=whole)
    accelerator, devices = config.trainer.accelerator, str(config.trainer.devices)
    if given is None and memory_gb is not None:
        given, origin = memory_gb, "as when this run began"
    elif given is None:
        given, origin = measured_gb(accelerator, max(1, int(devices)) if devices.isdigit() else 1)
    else:
        origin = "plan.memory_gb"
    precision = config.trainer.precision or "auto"  # null is for perf=autotune to measure
    precision = resolve_precision("auto", accelerator) if precision == "auto" else str(precision)
    budget = Budget(given, origin, precision, config.perf.activation_checkpointing or "none")
    return plan(
        found, overrides, budget, dataset.modalities, (dataset.image_targets or dataset.targets).num_outputs
    )


def derived(prepared: PreparedData) -> Values:
    """What a config may refer to as `${derived.…}`: known only once the data is prepared and planned."""
    planned = {
        key: configs.tuples_to_lists(value)
        for key, value in prepared.plan.values().items()
        if key != "batch_size"
    }
    first = [1] * prepared.recipe.spatial_dims
    return {
        "num_channels": len(prepared.dataset.modalities),
        "num_classes": (prepared.image_targets or prepared.targets).num_outputs,
        "targets": None if prepared.image_targets else prepared.targets.plain(),
        **_outcome_facts(prepared.image_targets, prepared.train),
        "overlapping": _overlapping(prepared),  # for a sigmoid per channel
        "exclusive": not _overlapping(prepared),  # for a softmax
        "class_names": list(prepared.dataset.class_names),
        "flip_label_pairs": configs.tuples_to_lists(prepared.flip_label_pairs) or None,
        "train_cases": f"{len(prepared.train)} cases, {short_hash([case.id for case in prepared.train])}",
        **planned,
        "stage_strides": [first, *planned["strides"]],
    }


def _overlapping(prepared: PreparedData) -> bool:
    return (
        prepared.image_targets.kind == "multilabel"
        if prepared.image_targets
        else prepared.targets.overlapping
    )


def _outcome_facts(image_targets: ImageLevelTargets | None, train: list[Case]) -> Values:
    """What is asked of whole images, and what the training cases have of it; None of what has no meaning."""
    values = np.array([case.values for case in train], dtype=float) if image_targets else np.empty((0, 0))
    numbers = image_targets is not None and image_targets.kind == "regression"
    return {
        "image_targets": image_targets.plain() if image_targets else None,
        "class_counts": splits.class_counts(train, image_targets) if image_targets and not numbers else None,
        "value_means": values.mean(0).tolist() if numbers else None,
        "value_stds": [std or 1.0 for std in values.std(0).tolist()] if numbers else None,
    }


def data_module(values: Values, prepared: PreparedData) -> DataModule:
    """The loaders of a resolved config."""
    settings, known = values["data"], values["derived"]
    augment = configs.build(
        values["augmentation"],
        "augmentation",
        seed=values["seed"],
        spacing_mm=known["spacing_mm"],
        patch_size=known["patch_size"],
        flip_label_pairs=configs.lists_to_tuples(known["flip_label_pairs"] or []),
        left_right_axis=left_right_axis(known["slice_axis"]),
    )
    keys = (
        "batch_size",
        "samples_per_epoch",
        "oversample_foreground",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
    )
    return DataModule(
        prepared.store,
        prepared.train,
        prepared.val,
        known["patch_size"],
        augment,
        seed=values["seed"],
        slice_axis=known["slice_axis"],
        draw_from=splits.indices_by_class(prepared.train, prepared.image_targets)
        if prepared.image_targets and settings["balanced_sampling"]
        else None,
        **{key: settings[key] for key in keys},
    )
