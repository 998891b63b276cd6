"""The plan of a run, from its config, its data and its machine; and what its nodes may use of both."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from medconv import config as configs
from medconv import doors
from medconv.config import DataConfig, Derived, PlanConfig, RunConfig
from medconv.data import splits
from medconv.data.case import Case, Dataset
from medconv.data.io.raster import are_picture_channels
from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.data.preprocessing.normalisation import BY_CHANNEL_NAME, normalisation_for
from medconv.data.preprocessing.value_bands import are_hounsfield
from medconv.planning.limits import EarlierPlan, PlanOverrides
from medconv.planning.planner import PatchSearch, Plan, need_axes, plan
from medconv.planning.topology import GB, Budget, Network, stem_for
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.run_dir import short_hash
from medconv.training.weight_source import weight_source
from medconv.utils.errors import ArgumentError
from medconv.utils.hardware import resolve_precision, total_memory, uses_gpu
from medconv.utils.logging import size_text, some

log = logging.getLogger(__name__)

# Arguments of `PlanOverrides` to the keys that set them.
_PLAN_KEYS = {entry.name: f"plan.{entry.name}" for entry in fields(PlanConfig)}
del _PLAN_KEYS["memory_gb"], _PLAN_KEYS["size"]  # of the budget
_DATA_KEYS = {
    "spatial_dims": "data.spatial_dims",
    "slice_axis": "data.slice_axis",
    "spacing_mm": "data.spacing_mm",
    "patch_size": "data.patch_size",
    "batch_size": "data.batch_size",
    "normalisation": "data.normalisation",
    "resize": "data.resize",
}
_MODEL_KEYS = {key: f"model.{key}" for key in ("divisible_by", "residual_blocks", "convs_per_stage")}
_FLOAT32 = 4  # bytes of a voxel
# Memory budgets are rounded down to these, so that similar machines plan the same.
_STEPS_GB = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
# Share of all memory. A GPU also holds CUDA itself, convolution workspace and fragmentation; main memory
# also holds the loader's workers, the page cache and other programs.
_SHARE = {"gpu": 0.8, "cpu": 0.5}
# Upper limits, because more memory means larger patches. On a CPU time is the limit: 1 GB is about a second
# per step. On a GPU, going from 23 to 37 GB gave nnU-Net 0.02 points of Dice, averaged over six datasets, in
# twice the time (Isensee et al. 2024, arXiv:2404.09556).
_MAX_GB = {"gpu": 24.0, "cpu": 1.0}


@configs.arguments_as_keys("data", "plan", **_MODEL_KEYS)
def make_plan(
    config: RunConfig, dataset: Dataset, measured: Fingerprint, earlier_plan: EarlierPlan | None = None
) -> Plan:
    """The plan of a config for a dataset.

    Args:
        measured: fingerprint of the dataset.
        earlier_plan: of the run to resume; None: a new run.
    Raises:
        ValueError: as `plan`.
    """
    if earlier_plan is None and config.init.pretrained is not None:
        earlier_plan = weight_source(config.init.pretrained).earlier_plan(config)
    earlier = earlier_plan or EarlierPlan("")
    overrides = _overrides(config)
    kind = dataset.targets.family.own("planning")
    # Exposure and stain differ between pictures; a value that is to be predicted may depend on them
    of_pictures = "zscore" if isinstance(dataset.targets, SegmentationTargets) else "dataset"
    if config.data.normalisation is None:
        normalisation, origin = earlier.normalisation, earlier.origin
        # That of a run to resume may be from before a default
        if len(normalisation) != len(dataset.modalities):
            normalisation, origin = _with_ct(dataset, measured, config.data), "the values are those of CT"
        if normalisation:
            names = {**overrides.names, "normalisation": origin}
            overrides = replace(overrides, normalisation=normalisation, names=names)
    # The run to resume, or whose weights these are, took slices, and so does this one
    is_open = config.data.spatial_dims is None and config.data.slice_axis is None
    if earlier.takes_slices and is_open and measured.spatial_dims == 3 and dataset.targets.per_voxel:
        overrides = replace(
            overrides, spatial_dims=2, slice_axis=earlier.slice_axis, dims_origin=earlier.origin
        )
    budget = _memory_budget(config, earlier)
    # By an interpolation anywhere in its node
    has_planned_channels = "derived.channels" in str(config.model)

    def planned(size: str, origin: str, warns: bool = True) -> Plan:
        size_plan = plan(
            measured,
            overrides,
            replace(budget, size=size, size_origin=origin),
            dataset.modalities,
            dataset.targets.num_outputs,
            warns=warns,
            kind=kind,
            of_pictures=of_pictures,
        )
        if config.data.resize is None:
            size_plan = _within_memory(size_plan, dataset, measured, config.data.store)
        return size_plan if has_planned_channels else _with_note_on_channels(size_plan)

    if config.plan.size is not None:
        return planned(config.plan.size, "plan.size")
    if earlier.size is not None:
        return planned(earlier.size, earlier.origin)
    on_gpu = uses_gpu(config.trainer.accelerator)
    if config.trainer.max_time is None:
        size = "full" if on_gpu else "large"
        return planned(size, f"{budget.size_origin}; with trainer.max_time the plan may be another one")
    plan_by_time = doors.named(doors.TUNERS, "size")
    if plan_by_time is None:
        size = "large" if on_gpu else "small"
        return planned(size, "not measured, as this installation lacks medconv.features.autotune")
    values = splits.values_of(dataset.cases)
    fitted_targets = dataset.targets.fitted(values) if values.size else dataset.targets

    def derive(size_plan: Plan) -> Derived:
        return derived_values(size_plan, dataset, dataset.cases, fitted_targets)

    chosen: Plan = plan_by_time(config, planned, derive, budget)
    return chosen


@configs.arguments_as_keys("data", "plan", **_MODEL_KEYS)
def network_without_data(config: RunConfig, patch: Sequence[int], spacing_mm: Sequence[float]) -> Network:
    """The stages that a plan would have for this patch on this grid.

    Raises:
        ConfigError: values of the config that do not fit the patch or each other.
    """
    need_axes("spacing_mm", spacing_mm, len(patch))
    search = PatchSearch(
        spacing=tuple(spacing_mm),
        median=tuple(patch),
        overrides=_overrides(config),
        budget=Budget(size=config.plan.size or "full"),
        num_channels=1,
        num_classes=2,
    )
    network, _ = search.network_for(patch, exact=True)
    return network


def _with_ct(dataset: Dataset, measured: Fingerprint, data: DataConfig) -> tuple[str, ...]:
    """The normalisation of each channel, where one has the values of CT and its name does not say so; else
    empty. Of label maps of volumes, for which alone it was measured; conventions of others have their own
    rule.
    """
    are_volumes = measured.spatial_dims == 3 and not are_picture_channels(dataset.modalities)
    is_measured = are_volumes and isinstance(dataset.targets, SegmentationTargets)
    if data.convention is not None or not is_measured:
        return ()
    names = list(normalisation_for(None, dataset.modalities))
    found = []
    for channel, rows in enumerate(zip(*measured.percentiles, strict=True)):
        if dataset.modalities[channel].strip().lower() not in BY_CHANNEL_NAME and are_hounsfield(rows):
            names[channel] = "ct"
            found.append(dataset.modalities[channel])
    if not found:
        return ()
    log.info(
        "data: the values of %s are those of CT in every case, so they are normalised as CT is; "
        "data.normalisation=zscore: as others are",
        some(found),
    )
    return tuple(names)


def _within_memory(size_plan: Plan, dataset: Dataset, measured: Fingerprint, store: str) -> Plan:
    """The plan; it says so if prepared cases exceed the main memory, so that a compressed store pays.

    Args: store: of `data`.
    Raises: ArgumentError: the largest image does not fit into main memory once resampled.
    """
    target_mm = list(size_plan.spacing_mm)
    if size_plan.slice_axis is not None:  # slices keep their own
        target_mm.insert(size_plan.slice_axis, 0.0)
    spacings_mm = np.array(measured.spacings_mm)
    scales = np.divide(spacings_mm, target_mm, out=np.ones_like(spacings_mm), where=np.array(target_mm) > 0)
    shapes = np.array(measured.shapes) * scales
    image_bytes = len(measured.intensities) * _FLOAT32  # of a voxel
    memory_gb = total_memory() / GB
    gigabytes = shapes.prod(1) * image_bytes / GB
    largest = int(gigabytes.argmax())
    if gigabytes[largest] > memory_gb:
        raise ArgumentError(
            "spacing_mm",
            f": case {dataset.cases[largest].id} has {size_text(spacings_mm[largest])} mm, and at "
            f"{size_text(size_plan.spacing_mm, 4)} mm {size_text(shapes[largest].round().astype(int))} "
            f"voxels, {gigabytes[largest]:.3g} GB; this machine has {memory_gb:.3g}. Choose a coarser one, "
            "or correct the headers",
        )
    label_bytes = 1 if len(dataset.class_names) <= 256 else 2
    store_gb = shapes.prod(1).sum() * (image_bytes + label_bytes) / GB
    if store != "npy" or not dataset.targets.per_voxel or store_gb <= memory_gb:
        return size_plan
    reason = (
        f"prepared cases exceed the {memory_gb:.3g} GB of memory, so patches are read from the disk: "
        "data.store=blosc2 about halves them"
    )
    return replace(size_plan, rows=(*size_plan.rows, ("store", f"{store_gb:.3g} GB", reason)))


def _overrides(config: RunConfig) -> PlanOverrides:
    """What the config sets of the plan."""
    settings: dict[str, Any] = {key: getattr(config.plan, key) for key in _PLAN_KEYS}
    settings |= {key: getattr(config.data, key) for key in _DATA_KEYS}
    settings |= {key: config.model[key] for key in _MODEL_KEYS if key in config.model}
    names = {**_PLAN_KEYS, **_DATA_KEYS, **_MODEL_KEYS}
    return PlanOverrides(**settings, names=names)


def check_stages(model: Mapping[str, Any], made: Plan) -> None:
    """Raises: ConfigError: the network would have the plan's strides, and channels of other stages."""
    channels = model.get("channels")
    is_ours = str(model["_target_"]).startswith("medconv.")  # MONAI's takes fewer channels than strides
    if is_ours and isinstance(channels, list) and "derived.strides" in str(model.get("strides")):
        stages = len(made.channels)
        if len(channels) != stages:
            raise configs.ConfigError(
                f"model.channels={channels}: the plan has {stages} stages, so it must be {stages} numbers; "
                "plan.channels plans as many stages as it has numbers"
            )


def _with_note_on_channels(size_plan: Plan) -> Plan:
    """The plan, which says that the network has channels of its own."""
    note = "these are our own network's, used to estimate memory; the model has others"
    rows = []
    for name, value, reason in size_plan.rows:
        rows.append((name, value, f"{reason}; {note}" if name == "channels" else reason))
    return replace(size_plan, rows=tuple(rows))


def _memory_budget(config: RunConfig, earlier: EarlierPlan) -> Budget:
    """The budget of a run, or of the one to resume."""
    accelerator = config.trainer.accelerator
    if config.plan.memory_gb is not None:
        gb = config.plan.memory_gb
        origin = "plan.memory_gb"
    elif earlier.memory_gb is not None:
        gb = earlier.memory_gb
        origin = earlier.origin
    elif uses_gpu(accelerator):
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        gb, origin = usable_gb("gpu", min(gpu.total_memory for gpu in gpus))  # the smallest counts
    else:
        devices = str(config.trainer.devices)
        num_devices = int(devices) if devices.isdigit() else 1  # "auto", or a list
        gb, origin = usable_gb("cpu", total_memory(), max(1, num_devices))
    precision = str(config.trainer.precision or "auto")  # null: perf=autotune measures it
    if precision == "auto":
        precision = resolve_precision("auto", accelerator)
    return Budget(
        memory_gb=gb,
        origin=origin,
        precision=precision,
        activation_checkpointing=config.perf.activation_checkpointing or "none",
    )


def usable_gb(kind: str, total_bytes: float, processes: int = 1) -> tuple[float, str]:
    """Memory for a step on one device in GiB, rounded down, and a text that says where it comes from.

    It is a share of the total memory, not of the free memory, so that the same command plans the same again.

    Args:
        kind: gpu or cpu.
        total_bytes: of the device, or of main memory.
        processes: that share it.
    """
    # the largest step that fits: a plan then does not depend on a few MB more or less
    usable = _SHARE[kind] * total_bytes / GB / processes
    bounded = min(usable, _MAX_GB[kind])
    step_gb = max((step for step in _STEPS_GB if step <= bounded), default=_STEPS_GB[0])
    installed = f"{total_bytes / GB:.3g} GB"
    if usable >= _MAX_GB[kind]:
        source = f"the most medconv uses on a {kind.upper()} ({installed} installed)"
    else:
        source = f"{100 * _SHARE[kind]:g} % of {installed} of {kind.upper()} memory"
    if processes > 1:
        source += f", {processes} processes"
    return float(step_gb), source


def derived_values(
    plan: Plan,
    dataset: Dataset,
    train: Sequence[Case],
    targets: Targets,
    flip_label_pairs: tuple[tuple[int, int], ...] = (),
    several_kinds: bool = False,
) -> Derived:
    """What follows from the data and its plan.

    Args:
        targets: with what follows from the training cases.
        flip_label_pairs: outputs that mirroring exchanges.
        several_kinds: the cases are pictures of several kinds, see `per_case.kind_weights`.
    """
    monitored = targets.monitored
    planned = {key: configs.tuples_to_lists(value) for key, value in plan.values().items()}
    del planned["batch_size"]  # it stands in `data`
    # The first stage keeps the resolution
    first_strides = [1] * plan.spatial_dims
    values = splits.values_of(train)
    return Derived(
        num_channels=len(dataset.modalities),
        num_classes=targets.num_outputs,
        targets=targets.plain(),
        per_voxel=targets.per_voxel,
        class_counts=targets.output_counts(values) if values.size else None,
        overlapping=not targets.exclusive,
        exclusive=targets.exclusive,
        class_names=list(dataset.class_names),
        flip_label_pairs=configs.tuples_to_lists(flip_label_pairs) or None,
        train_cases=f"{len(train)} cases, {short_hash([case.id for case in train])}",
        **planned,
        stage_strides=[first_strides, *planned["strides"]],
        monitor=monitored.name,
        monitor_mode=monitored.mode,
        num_train_cases=len(train),
        batch_dice=not several_kinds,
        stem=stem_for(planned["patch_size"]),
        modalities=list(dataset.modalities),
    )
