"""The plan of a run: network, patch and batch from its config, its data and its machine."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from medconv.config import Node, RunConfig
from medconv.data import splits
from medconv.data.case import Dataset
from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.models.pretrained.read import planned_as
from medconv.performance.memory_budget import measured_gb
from medconv.planning.memory_model import Budget
from medconv.planning.overrides import PlanOverrides
from medconv.planning.planner import Plan, plan
from medconv.training import plan_for_time
from medconv.training.derived_values import derived_values
from medconv.utils.hardware import resolve_precision, uses_gpu

_NEED_3D = ("medconv.convs.acs",)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def make_plan(
    config: RunConfig, dataset: Dataset, measured: Fingerprint, recorded: Mapping[str, Any] = NOTHING
) -> Plan:
    """The plan of a config for a dataset.

    Args: recorded: what `RunDir.planned` has of the run to resume. Raises: ValueError: as `plan`.
    """
    begun, weights = "as when this run began", None if recorded else config.init.pretrained
    if weights is not None:
        recorded, begun = planned_as(Path(weights)), "that of the weights to begin from"
    settings = {key: value for key, value in vars(config.plan).items() if key not in ("memory_gb", "size")}
    keys = ("spatial_dims", "slice_axis", "spacing_mm", "patch_size", "batch_size", "normalisation", "resize")
    image_level, model = not dataset.targets.per_voxel, config.model
    settings |= {key: getattr(config.data, key) for key in keys}
    settings |= {key: model[key] for key in ("divisible_by", "residual_blocks") if key in model}
    if model.get("residual_blocks"):
        settings["decoder_convs"] = model["convs_per_stage"]
    settings["thick_as_slices"] = not image_level and not recorded and may_take_slices(config)
    keeps_slices = _keeps_slices(config, recorded, weights is not None)
    if measured.spatial_dims == 3 and not image_level and keeps_slices:
        axis = recorded["slice_axis"] if weights is None else None  # weights fit slices across any
        settings |= {"spatial_dims": 2, "slice_axis": axis, "dims_origin": begun}
    overrides = PlanOverrides(**settings, image_level=image_level)
    modalities, num_outputs = dataset.modalities, dataset.targets.num_outputs
    budget = _memory_budget(config, recorded.get("memory_gb"))

    def planned(size: str, origin: str) -> Plan:
        chosen = replace(budget, size=size, size_origin=origin)
        return _as_used(plan(measured, overrides, chosen, modalities, num_outputs, warns=bool(origin)), model)

    if config.plan.size is not None:
        return planned(config.plan.size, "plan.size")
    if "size" in recorded:
        return planned(recorded["size"], begun)
    if config.trainer.max_time is None:
        return planned("large", budget.size_origin)
    fitted = dataset.targets.fitted(splits.values_of(dataset.cases))
    return plan_for_time.fitting(
        config, planned, lambda made: derived_values(made, dataset, dataset.cases, fitted), budget
    )


def _as_used(made: Plan, model: Node) -> Plan:
    """The plan, which says so where a network has channels of its own."""
    if "derived.channels" in str(model):
        return made
    ours = "of our own network, by which memory is estimated; the model has others"
    rows = [(what, value, f"{why}; {ours}" if what == "channels" else why) for what, value, why in made.rows]
    return replace(made, rows=tuple(rows))


def may_take_slices(config: RunConfig) -> bool:
    """Whether time decides about the network, and nothing in the config needs three axes or its weights."""
    free = config.plan.size is None and config.init.pretrained is None and _suits_slices(config)
    ours = str(config.model.get("_target_")).startswith("medconv.")
    return config.trainer.max_time is not None and free and ours


def _keeps_slices(config: RunConfig, recorded: Mapping[str, Any], weights: bool) -> bool:
    """Whether the run to resume, or whose weights these are, took slices, and so does this one."""
    free = config.data.spatial_dims is None and config.data.slice_axis is None
    suits = not weights or (config.init.inflate_2d is None and _suits_slices(config))
    return recorded.get("slice_axis") in (0, 1, 2) and free and suits


def _suits_slices(config: RunConfig) -> bool:
    """Whether nothing in the config needs three axes."""
    data, planned = config.data, config.plan
    for_axes = (data.spacing_mm, data.patch_size, planned.strides, planned.kernel_sizes)
    return all(value is None for value in for_axes) and config.conv["_target_"] not in _NEED_3D


def _memory_budget(config: RunConfig, earlier_gb: float | None) -> Budget:
    accelerator, devices = config.trainer.accelerator, str(config.trainer.devices)
    if config.plan.memory_gb is not None:
        gb, origin = config.plan.memory_gb, "plan.memory_gb"
    elif earlier_gb is not None:
        gb, origin = earlier_gb, "as when this run began"
    else:
        gb, origin = measured_gb(accelerator, max(1, int(devices)) if devices.isdigit() else 1)
    precision = config.trainer.precision or "auto"  # null: perf=autotune measures it
    precision = resolve_precision("auto", accelerator) if precision == "auto" else str(precision)
    return Budget(
        memory_gb=gb,
        origin=origin,
        precision=precision,
        activation_checkpointing=config.perf.activation_checkpointing or "none",
        coarsens=config.trainer.max_time is not None or not uses_gpu(accelerator),
    )
