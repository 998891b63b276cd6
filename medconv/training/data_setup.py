"""The data of a run: finds, checks, plans and preprocesses the dataset, and builds its loaders."""

import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from medconv import config as configs
from medconv import doors
from medconv.config import ConfigError, DataConfig, Derived, Node, RunConfig
from medconv.data import left_right, per_case, splits
from medconv.data.case import Case, Dataset, Grid
from medconv.data.io.images import shape_and_affine
from medconv.data.io.raster import are_picture_channels, check_ignored
from medconv.data.loading.datamodule import DataModule, LoaderSettings
from medconv.data.loading.patch import PatchShape
from medconv.data.loading.patch_dataset import ChannelDropout, annotated_classes
from medconv.data.loading.samplers import ForegroundSampler, Sampler, TrainingCases, balanced, class_indices
from medconv.data.loading.samples import Patches, Samples
from medconv.data.preprocessing import compressed
from medconv.data.preprocessing.check import assumed_spacing, far_values
from medconv.data.preprocessing.dataset_cache import (
    cached_fingerprint,
    dataset_folder,
    fill_store,
    sources_of,
)
from medconv.data.preprocessing.fingerprint import INTENSITIES, Fingerprint
from medconv.data.preprocessing.normalisation import DATASET_NORMALISATIONS
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.data.preprocessing.store import Store
from medconv.data.preprocessing.value_bands import Band, band_of
from medconv.data.splits import DataSplit
from medconv.performance.step_profiler import StepProfiler
from medconv.planning.limits import EarlierPlan
from medconv.planning.planner import Plan
from medconv.planning.report import table
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.distributed import batch_size_per_process, samples_per_epoch
from medconv.training.identity import DataIdentity
from medconv.training.plan_setup import check_stages, derived_values, make_plan
from medconv.utils import signals
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some
from medconv.utils.signals import StopRequest

log = logging.getLogger(__name__)
_CHANNEL_DROPOUT = 0.25  # the default of `data.channel_dropout` where channels may be missing


@dataclass(frozen=True)
class PreparedData:
    """A dataset ready to train on.

    Args:
        targets: with what follows from the training cases.
        derived: what a config's nodes may use of it.
        skipped: skipped cases, and why.
        spacing_range_mm: smallest and largest spacing of all cases along each axis (right, anterior,
            superior).
        value_bands: of each channel of all cases; None: none has it.
        test: cases that training never uses.
        split_warning: as of the function.
        source_spacing_mm: in place of the headers', as of `data.source_spacing_mm`, or what is assumed where
            headers have lost it; None: the headers are right.
    """

    dataset: Dataset
    train: list[Case]
    val: list[Case]
    preprocessing: PreprocessingConfig
    plan: Plan
    store: Store
    targets: Targets
    derived: Derived
    skipped: dict[str, str] = field(default_factory=dict)
    spacing_range_mm: tuple[tuple[float, float], ...] = ()
    value_bands: tuple[Band | None, ...] = ()
    test: list[Case] = field(default_factory=list)
    split_warning: str | None = None
    source_spacing_mm: Any = None

    def views(self, num_patches: float) -> float:
        """How often so many patches show each training case; one time is all of its voxels once."""
        patch = prod(self.plan.patch_size)
        shapes = (self.store.read(case.id).image.shape[1:] for case in self.train)
        return num_patches / sum(max(1.0, prod(shape) / patch) for shape in shapes)

    @cached_property
    def identity(self) -> DataIdentity:
        """Digests of the cases to train on and to validate, by their ids.

        A digest changes with what a case holds: arrays, values, weight and annotated classes.
        """
        digests: dict[str, dict[str, int]] = {"train": {}, "val": {}}
        for split, cases in (("train", self.train), ("val", self.val)):
            for case in cases:
                content = [self.store.digest(case.id), [case.values, case.weight, case.annotated]]
                digests[split][case.id] = zlib.crc32(json.dumps(content, default=str).encode())
        return digests


@configs.arguments_as_keys("data")
def find_data(data: DataConfig) -> Dataset:
    """The dataset of a config's `data`, with what further keys say of its cases."""
    if data.store == "blosc2":
        compressed.blosc2()  # before any file is read; an error where it is not installed
    dataset: Dataset = configs.build(data.layout, "data.layout")
    dataset = dataset.with_targets(
        regions=data.regions, regions_order=data.regions_order, ignore_label=data.ignore_label
    )
    # What further keys say of the cases; most runs set none of them
    if data.raters is not None or data.soft_labels:
        dataset = _with_soft_labels(dataset, data)
    if data.group_pattern is not None:
        dataset = replace(dataset, cases=splits.grouped(dataset.cases, data.group_pattern))
    if data.source_spacing_mm is not None:
        dataset = per_case.with_source_spacing(dataset, data.source_spacing_mm)
    if data.annotated is not None:
        dataset = per_case.with_annotated(dataset, data.annotated)
    if data.missing is not None:
        if dataset.targets.family.own("whole_images"):
            raise ConfigError(
                f"data.missing={data.missing}: networks of whole images do not learn to do without channels"
            )
        dataset = per_case.with_missing_channels(dataset)
    if data.case_weights is not None:
        dataset = per_case.with_weights(dataset, data.case_weights)
    if dataset.targets.ignore is not None:
        ignored = (dataset.targets.ignore, *dataset.targets.also_ignored)
        check_ignored(ignored, [case.label for case in dataset.cases], len(dataset.class_names))
    return dataset


def _with_soft_labels(dataset: Dataset, data: DataConfig) -> Dataset:
    """Raises: ConfigError: no feature brings targets that are probabilities."""
    soft_targets = doors.named(doors.TARGETS, "soft")
    if soft_targets is None:
        raise ConfigError(
            "data.raters and data.soft_labels are read by medconv.features.raters, which this installation "
            "lacks"
        )
    soft: Dataset = soft_targets.with_soft_labels(dataset, data.raters, data.soft_labels, data.root)
    return soft


def files_state(data: DataConfig) -> list[Any]:
    """Changes if a file of the dataset, even its time alone, or the split changes; reads no image."""
    dataset = find_data(data)
    split = split_cases(dataset, data)
    ids = [[case.id for case in cases] for cases in (split.train, split.val, split.test)]
    return [*sources_of(dataset), ids]


@configs.arguments_as_keys("data", "plan")
def prepare_data(
    config: RunConfig, verify: bool = False, earlier_plan: EarlierPlan | None = None
) -> PreparedData:
    """Find, check, plan and preprocess the dataset; finished work is reused.

    Args:
        verify: read every preprocessed case again and compare its checksums.
        earlier_plan: of the run to resume; None: this machine and the run's time count.
    """
    data = config.data
    # What there is; a wrong split or pair of classes is told before any image is read
    dataset = find_data(data)
    split_cases(dataset, data)
    pairs = flip_label_pairs(dataset, data)
    # Every file is checked and measured, or was before and has not changed
    home = dataset_folder(Path(data.cache_dir), dataset)
    with signals.raising():
        measured, skipped = cached_fingerprint(
            dataset, home, data.prepare_workers, skip=data.on_invalid_case == "skip"
        )
    found = planned_data(config, dataset, measured, skipped, earlier_plan)
    dataset, split = found.dataset, found.split
    with signals.raising():
        store = fill_store(
            dataset, found.preprocessing, home, data.prepare_workers, verify, data.store == "blosc2"
        )
    # What targets are scaled by comes from the training cases alone
    values = splits.values_of(split.train)
    targets = dataset.targets.fitted(values) if values.size else dataset.targets
    return PreparedData(
        dataset=dataset,
        train=split.train,
        val=split.val,
        preprocessing=found.preprocessing,
        plan=found.plan,
        store=store,
        targets=targets,
        derived=derived_values(
            found.plan, dataset, split.train, targets, pairs, several_kinds=found.several_kinds
        ),
        skipped=skipped,
        spacing_range_mm=tuple((min(mm), max(mm)) for mm in zip(*found.measured.spacings_mm, strict=True)),
        value_bands=tuple(map(band_of, zip(*found.measured.percentiles, strict=True))),
        test=split.test,
        split_warning=found.split_warning,
        source_spacing_mm=found.source_spacing_mm,
    )


@dataclass(frozen=True)
class PlannedData:
    """A dataset whose files were all checked, and how it will be prepared.

    Args:
        measured: of the cases, with the spacing that is taken.
        several_kinds: whether rare kinds of pictures are drawn more often.
        split_warning, source_spacing_mm: as of `PreparedData`.
    """

    dataset: Dataset
    split: DataSplit
    measured: Fingerprint
    plan: Plan
    preprocessing: PreprocessingConfig
    several_kinds: bool
    split_warning: str | None
    source_spacing_mm: Any


@configs.arguments_as_keys("data", "plan")
def planned_data(
    config: RunConfig,
    dataset: Dataset,
    measured: Fingerprint,
    skipped: Mapping[str, str],
    earlier_plan: EarlierPlan | None,
) -> PlannedData:
    """Split and plan of a dataset, and all that can be wrong with them before a case is prepared.

    Args:
        measured: of the cases without errors.
        skipped: the other cases, and why.
        earlier_plan: as in `make_plan`.
    """
    data = config.data
    split = split_cases(dataset, data)
    if data.num_folds != DataConfig.num_folds and (reason := _no_folds(dataset, data)):
        log.warning("data.num_folds=%d has no effect: %s", data.num_folds, reason)
    pairs = flip_label_pairs(dataset, data)
    # Only now it is known whether headers have lost the spacing, and which cases are invalid or twice there
    source_spacing_mm = data.source_spacing_mm or assumed_spacing(
        measured.shapes, measured.spacings_mm, dataset.targets
    )
    if source_spacing_mm and source_spacing_mm != data.source_spacing_mm:
        measured = measured.at_spacing(source_spacing_mm)
        dataset = per_case.with_source_spacing(dataset, source_spacing_mm)
        split = split_cases(dataset, data)
    if skipped:
        dataset, split = _without_skipped(dataset, split, skipped, data)
    kind_weights = _kind_weights(dataset, measured)
    if kind_weights and _draws_by_weight(config):
        log.info("data: rare kinds are drawn more often than they come (data.case_weights={}: as they come)")
        dataset = replace(dataset, cases=per_case.weighted(dataset.cases, kind_weights))
        split = DataSplit(*(list(per_case.weighted(cases, kind_weights)) for cases in split))
    split = check_split(split, dataset, measured, data)
    caution = split_warning(split, data)
    if caution:
        log.warning(caution)
    if any(case.annotated is not None or case.weight != 1 for case in dataset.cases):
        per_case.check_annotated(split.train, dataset, pairs)
        log_annotated_and_weights(split.train, dataset)
    if data.convention == "nnunet" and not (data.spacing_mm and data.patch_size):
        _check_stored_axes(dataset)
    # All cases count for the plan and for the statistics of intensities: folds share the store
    planned = make_plan(config, dataset, measured, earlier_plan)
    check_stages(config.model, planned)
    log.info("%s", table(planned.rows))
    for warning in far_values(dataset, measured, planned.normalisation):
        log.warning(warning)
    return PlannedData(
        dataset=dataset,
        split=split,
        measured=measured,
        plan=planned,
        preprocessing=_preprocessing(planned, dataset, measured, data),
        several_kinds=bool(kind_weights),
        split_warning=caution,
        source_spacing_mm=source_spacing_mm,
    )


def _without_skipped(
    dataset: Dataset, split: DataSplit, skipped: Mapping[str, str], data: DataConfig
) -> tuple[Dataset, DataSplit]:
    """Dataset and split without invalid cases.

    Raises: ConfigError: no case is left to train on, or to validate where there was one.
    """
    had_validation = bool(split.val)
    lines = "".join(f"\n  case {case}: {error}" for case, error in skipped.items())
    log.warning("data.on_invalid_case=skip skips %d of %d cases%s", len(skipped), len(dataset.cases), lines)
    valid_cases = tuple(case for case in dataset.cases if case.id not in skipped)
    split = splits.drop_cases(split, skipped)
    if not split.train:
        raise ConfigError(f"data.fold={data.fold}: no case is left to train on, all cases are invalid")
    if had_validation and not split.val:
        raise ConfigError(f"data.fold={data.fold}: no case is left to validate, all of its cases are invalid")
    return replace(dataset, cases=valid_cases), split


def _kind_weights(dataset: Dataset, measured: Fingerprint) -> dict[str, float]:
    """As `per_case.kind_weights`, of pictures with label maps."""
    are_labelled_pictures = isinstance(dataset.targets, SegmentationTargets) and are_picture_channels(
        dataset.modalities
    )
    if not are_labelled_pictures or any(case.missing_channels for case in dataset.cases):
        return {}
    ids = dataset.case_ids
    return per_case.kind_weights(dict(zip(ids, measured.percentiles, strict=True)))


def _draws_by_weight(config: RunConfig) -> bool:
    """Whether cases are drawn by their weights, and none is set."""
    data, sampler = config.data, config.sampler
    is_default = sampler.get("_target_") is None or sampler.get("by_weight", False) is None
    return data.case_weights is None and not data.balanced_sampling and is_default


def _check_stored_axes(dataset: Dataset) -> None:
    """Raises: ConfigError: a plan has axes right, anterior, superior, but a case has another order."""
    for case in dataset.cases:
        grid = Grid.of(*shape_and_affine(case.images[0]))
        if list(grid.canonical_axes[:, 0]) != [0, 1, 2]:
            raise ConfigError(
                f"data.convention=nnunet leaves axes as stored, here {grid.orientation} ({case.images[0]}), "
                "but a plan has them in the order right, anterior, superior: set data.spacing_mm and "
                "data.patch_size, or data.convention=nnunet_ras, which reorients"
            )


def flip_label_pairs(dataset: Dataset, data: DataConfig) -> tuple[tuple[int, int], ...]:
    """Outputs that are exchanged where an image is mirrored.

    Raises:
        ConfigError: the data has nothing to exchange, or no axis from left to right.
    """
    if data.flip_label_pairs is None:
        return ()
    if not dataset.targets.can_swap_labels:
        raise ConfigError(
            f"data.flip_label_pairs exchanges classes of label maps, but this run has {dataset.targets.kind} "
            "targets; set only one"
        )
    if data.convention == "nnunet":
        raise ConfigError(
            "data.flip_label_pairs needs axes from left to right; data.convention=nnunet leaves them as "
            "stored"
        )
    return left_right.flip_label_pairs(data.flip_label_pairs, dataset.class_names, dataset.targets.names)


def _preprocessing(
    planned: Plan, dataset: Dataset, measured: Fingerprint, data: DataConfig
) -> PreprocessingConfig:
    names = planned.normalisation
    intensities = measured.intensities
    if data.intensities is not None:
        is_used = any(name in DATASET_NORMALISATIONS for name in names)
        if not is_used and data.convention is None:  # nnU-Net's plans have them for all
            raise ConfigError(
                f"data.intensities is for the normalisations {' and '.join(DATASET_NORMALISATIONS)}, but "
                f"this is {', '.join(dict.fromkeys(names))}; data.normalisation chooses another"
            )
        intensities = intensities_of(data.intensities, names)
    return PreprocessingConfig(
        spatial_dims=planned.spatial_dims,
        spacing_mm=planned.spacing_mm,
        normalisation=names,
        intensities=intensities,
        slice_axis=planned.slice_axis,
        frame=None if dataset.targets.per_voxel else planned.patch_size,
        resize=tuple(data.resize) if data.resize else None,
        convention=data.convention,
    )


def intensities_of(content: Any, normalisation: Sequence[str]) -> tuple[dict[str, float], ...]:
    """`data.intensities` of a config that sets it.

    Args: normalisation: of each channel.
    Raises:
        ConfigError: not one set of statistics per channel, or numbers that no image has where they are used.
    """
    is_row_per_channel = isinstance(content, (list, tuple)) and len(content) == len(normalisation)
    if not is_row_per_channel or not all(
        isinstance(row, Mapping) and set(row) == set(INTENSITIES) for row in content
    ):
        needed = f"{', '.join(INTENSITIES)} for each of {len(normalisation)} channels"
        raise ConfigError(f"data.intensities needs {needed}, got {content}")
    rows = tuple({key: float(value) for key, value in row.items()} for row in content)
    for row, name in zip(rows, normalisation, strict=True):
        is_right = all(map(math.isfinite, row.values())) and row["std"] >= 0  # 0: of a constant channel
        if name == "ct":
            is_right = is_right and row["percentile_00_5"] <= row["percentile_99_5"]
        if name in DATASET_NORMALISATIONS and not is_right:
            raise ConfigError(
                "data.intensities needs finite numbers, std of 0 or more and percentile_00_5 not above "
                f"percentile_99_5, got {row}"
            )
    return rows


def split_warning(split: DataSplit, data: DataConfig) -> str | None:
    """Why the scores of a split may be too high; None: nothing is known against it."""
    patient = None if data.splits_file is not None else splits.split_patient(split)
    if patient is None:
        return None
    return (
        f"{patient.train} is in training and {patient.val} in validation; if they are of one patient, "
        f"the scores are too high: data.group_pattern='{patient.group_pattern}' keeps a patient's cases in "
        "one fold"
    )


@configs.arguments_as_keys("data")
def split_cases(dataset: Dataset, data: DataConfig) -> DataSplit:
    """The split that the dataset or `data.fold` defines. Raises: ValueError: see `splits.split_cases`."""
    splits_file = Path(data.splits_file) if data.splits_file else None
    return splits.split_cases(dataset.cases, data.fold, data.num_folds, splits_file)


def _no_folds(dataset: Dataset, data: DataConfig) -> str | None:
    """Why the cases are not divided into `data.num_folds` folds; None: they are."""
    if data.splits_file is not None:
        return f"{data.splits_file} has the folds"
    if data.fold == "all":
        return "data.fold=all trains on every case"
    if any(case.split == "val" for case in dataset.cases):
        return "the dataset defines its training and validation cases"
    return None


@configs.arguments_as_keys("data")
def check_split(split: DataSplit, dataset: Dataset, measured: Fingerprint, data: DataConfig) -> DataSplit:
    """The split without training images that are also in validation or test.

    Args: measured: of all cases of `dataset`.
    Raises: ValueError: no training case, a class without examples, or as the targets' family says.
    """
    # strict=False: there are no contents if all images are constant
    contents = dict(zip(dataset.case_ids, measured.contents, strict=False))
    if not split.train:
        raise ConfigError(f"data.fold={data.fold}: no case to train on, all are in validation or test")
    split = splits.drop_duplicates(split, contents)
    if split.train[0].values is not None:
        splits.check_examples(split, dataset.targets, _remedy(split, data))
    if isinstance(dataset.targets, SegmentationTargets):
        _warn_of_foreground(split, dataset.targets, dataset, measured)
    whole_images = dataset.targets.family.own("whole_images")
    if whole_images:
        whole_images.check(split, dataset, measured, data)
    return split


def _warn_of_foreground(
    split: DataSplit, targets: SegmentationTargets, dataset: Dataset, measured: Fingerprint
) -> None:
    """Of classes that only cases outside training have, and of a validation without foreground: a false
    positive has Dice 0 there, and a right answer has none, so that no network is the best.
    """
    voxels_of_case = {
        case.id: voxels for case, voxels in zip(dataset.cases, measured.class_voxels, strict=False)
    }
    in_training = [voxels_of_case[case.id] for case in split.train if case.id in voxels_of_case]
    if in_training and not targets.draws_classes:
        of_all = np.sum(list(voxels_of_case.values()), axis=0)
        of_training = np.sum(in_training, axis=0)
        lost = []
        for name, values in targets.by_name.items():  # a region has several values
            indices = [value for value in values if value < len(of_all)]
            if of_all[indices].sum() > 0 and of_training[indices].sum() == 0:
                lost.append(name)
        if lost:
            log.warning(
                "no training case has a voxel of %s, which only cases outside training have: the network "
                "cannot learn it, and its Dice counts as 0 there; another data.fold may have cases with it",
                some(lost, 20),
            )
    counts = [sum(voxels_of_case[case.id][1:]) for case in split.val if case.id in voxels_of_case]
    if counts and not any(counts):
        log.warning(
            "no validation case has foreground, so that Dice cannot tell a good network from a poor one; "
            "another data.fold or data.splits_file may have cases with it"
        )


def _remedy(split: DataSplit, data: DataConfig) -> str:
    """What changes which cases are in training and validation."""
    if data.splits_file is not None:
        return f"change fold {data.fold} of {data.splits_file}"
    if any(case.split == "val" for case in split.val):
        return "the dataset itself defines the splits: correct it there, or data.splits_file sets others"
    return "another data.fold or data.num_folds may help"


def build_sampler(node: Node, data: DataConfig, cases: TrainingCases) -> Sampler:
    """The sampler of a resolved config.

    Args:
        node: the config's `sampler`; without a `_target_`, keys of `data` choose it.
    Raises:
        ConfigError: the node describes no sampler, or one that does not use a key of `data` that is set.
        ValueError: balanced sampling for targets without classes.
    """
    foreground_share = data.oversample_foreground
    sets_share = foreground_share != DataConfig.oversample_foreground
    if sets_share and cases.whole_images is not None:
        log.info("data.oversample_foreground has no effect: whole images with values have no foreground")
    if node.get("_target_") is None:
        make_sampler = balanced if data.balanced_sampling else ForegroundSampler
        return make_sampler(cases, foreground_share)
    target = node["_target_"]
    sampler = configs.build(node, "sampler", cases=cases)
    if not isinstance(sampler, Sampler):
        raise ConfigError(f"sampler._target_={target} must make a {Sampler.__module__}.Sampler")
    if data.balanced_sampling and not sampler.balances_classes:
        raise ConfigError(
            f"data.balanced_sampling=true has no effect with sampler._target_={target}; set only one of "
            "them, or choose sampler=balanced"
        )
    if sets_share and cases.whole_images is None and foreground_share != sampler.foreground_share:
        raise ConfigError(
            f"data.oversample_foreground={foreground_share} has no effect with sampler._target_={target}, "
            f"whose foreground_share is {sampler.foreground_share:g}; set only one of them"
        )
    return sampler


def _no_classes() -> list[list[int]]:
    raise ArgumentError(
        "balanced_sampling",
        "=true, as sampler=balanced, draws each class equally often, and these targets have no classes",
    )


def log_annotated_and_weights(train: Sequence[Case], dataset: Dataset) -> None:
    """Log which classes training cases annotate, and their weights; nothing where all cases are alike."""
    if any(case.annotated is not None for case in train):
        counts = [
            f"{name} in {sum(case.annotated is None or value in case.annotated for case in train)}"
            for value, name in enumerate(dataset.class_names[1:], start=1)
        ]
        log.info("data: training cases that annotate a class, of %d: %s", len(train), ", ".join(counts))
    weights = Counter(case.weight for case in train)
    if len(weights) > 1:
        counts = [f"{weight:g} of {count}" for weight, count in sorted(weights.items())]
        log.info("data: training cases are drawn by weight: %s", ", ".join(counts))


@configs.arguments_as_keys("data")
def build_data(
    config: RunConfig,
    prepared: PreparedData,
    profiler: StepProfiler | None = None,
    stop_request: StopRequest | None = None,
) -> DataModule:
    """The loaders of a resolved config. Args: profiler, stop_request: of a run."""
    data = config.data
    assert data.batch_size is not None and data.samples_per_epoch is not None  # resolved
    derived = config.derived
    patch = PatchShape(derived.patch_size, derived.slice_axis)
    class_names = prepared.dataset.class_names
    family = prepared.targets.family
    whole_images = family.own("whole_images")
    own_labels = family.own("labels")
    indices: Callable[[], list[list[int]]]
    if whole_images is None and not isinstance(prepared.targets, SegmentationTargets):
        indices = _no_classes
    elif whole_images is None:
        indices = partial(class_indices, prepared.train, class_names, prepared.store)
    else:
        indices = partial(whole_images.class_indices, prepared.train, prepared.targets)
    training_cases = TrainingCases(prepared.train, patch, indices, config.seed, whole_images)
    split = DataSplit(prepared.train, prepared.val, prepared.test)
    all_cases = [*split.train, *split.val, *split.test]
    annotated = None
    if any(case.annotated is not None for case in all_cases):
        annotated = annotated_classes(all_cases, prepared.targets, class_names)
    channel_dropout = None
    if data.missing is not None or data.channel_dropout is not None:
        channel_dropout = _channel_dropout(data, derived.num_channels, prepared.train, config.seed)
    pairs = configs.lists_to_tuples(derived.flip_label_pairs or [])
    if not prepared.targets.exclusive:  # no background comes before the first name, which is number 1
        pairs = tuple((first + 1, second + 1) for first, second in pairs)
    augment = configs.build(
        config.augmentation,
        "augmentation",
        seed=config.seed,
        spacing_mm=derived.spacing_mm,
        patch_size=derived.patch_size,
        flip_label_pairs=pairs,
        left_right_axis=left_right.left_right_axis(derived.slice_axis),
    )
    drawn = (build_sampler(config.sampler, data, training_cases), augment)
    if whole_images is None:
        samples: Samples = Patches(
            *drawn,
            patch,
            annotated=annotated,
            channel_dropout=channel_dropout,
            own_reference=own_labels and partial(own_labels.reference, prepared.targets),
        )
    else:
        samples = whole_images.Images(*drawn)
    return DataModule(
        prepared.store,
        split,
        samples,
        LoaderSettings(
            batch_size=batch_size_per_process(config),
            samples_per_epoch=samples_per_epoch(config),
            num_workers=data.num_workers,
            prefetch_factor=data.prefetch_factor,
            persistent_workers=data.persistent_workers,
        ),
        profiler=profiler,
        stop_request=stop_request,
    )


def _channel_dropout(data: DataConfig, num_channels: int, train: Sequence[Case], seed: int) -> ChannelDropout:
    """Raises: ConfigError: a probability where no channel may be missing."""
    if data.missing is None:
        raise ConfigError(f"data.channel_dropout={data.channel_dropout} needs data.missing=allow")
    probability = _CHANNEL_DROPOUT if data.channel_dropout is None else data.channel_dropout
    missing = {case.id: case.missing_channels for case in train if case.missing_channels}
    return ChannelDropout(probability, num_channels, missing, seed)
