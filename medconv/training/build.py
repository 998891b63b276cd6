"""Builds the task of a run from a resolved config: network, loss, optimizer, schedule, validation."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor, nn

from medconv import config as configs
from medconv.config import Node, RunConfig, TrainerConfig
from medconv.convs import mirror_axes
from medconv.data import left_right
from medconv.data.preprocessing.preprocess import left_right_axis, restore
from medconv.data.preprocessing.store import Store
from medconv.inference.load import window_of
from medconv.inference.tta import flips, training_axes, usable_axes
from medconv.models.build import build_network
from medconv.models.layers.max_pool import swap_pools
from medconv.models.pretrained.freeze import check_factors, freeze
from medconv.performance.switches import apply_switches, memory_format
from medconv.targets import Targets
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.data_setup import PreparedData
from medconv.training.growing_patch import GrowingPatch
from medconv.training.losses.fit import FittedLoss
from medconv.training.mixup import Mixup
from medconv.training.optim import lr_schedulers
from medconv.training.optim.build import build_optimizer
from medconv.training.optim.param_groups import with_lr_multipliers
from medconv.training.task import Task
from medconv.training.validation import ImageLevelValidation, LabelMapValidation, Validation

log = logging.getLogger(__name__)

_SWITCHES = (
    "channels_last",
    "fast_norm",
    "fast_depthwise",
    "activation_checkpointing",
    "compile",
    "cuda_graphs",
)


def build_task(
    config: RunConfig, record: Node, store: Store | None = None, load: Callable[..., Any] | None = None
) -> Task:
    """The task of a resolved config: network, loss, optimizer, schedule and validation.

    Args: record: what every checkpoint carries. store: prepared cases, for validation on their own grids;
        None: nothing will be validated. load: loads pretrained weights into the network.
    """
    derived, perf, settings = config.derived, config.perf, config.task
    targets, dims = Targets.from_plain(derived.targets), derived.spatial_dims
    network = _network(config, targets, load)
    optimizer = build_optimizer(config.optimizer, config.trainer, perf.fused_optimizer)
    factors = config.init.lr_multipliers or {}
    check_factors(factors, network)
    if targets.per_voxel and settings.mixup:
        raise configs.ConfigError(
            f"task.mixup={settings.mixup} is for image-level targets, but the data has label maps"
        )
    return Task(
        network,
        FittedLoss(configs.build(config.loss, "loss"), targets, dims),
        with_lr_multipliers(optimizer, network, factors),
        configs.errors_with_key("scheduler", configs.build(config.scheduler, "scheduler")),
        targets,
        _validation(config, targets, network, store),
        record,
        deep_supervision=settings.deep_supervision,
        growing_patch=_growing_patch(config, network),
        mixup=Mixup(settings.mixup, config.seed) if settings.mixup else None,
        memory_format=memory_format(bool(perf.channels_last), dims),
    )


def _growing_patch(config: RunConfig, network: nn.Module) -> GrowingPatch | None:
    """Raises: ConfigError: `schedule.patch` is none of its values, or progressive where that cannot be."""
    setting, perf = config.schedule.patch, config.perf
    if setting not in (None, "progressive", "whole"):
        raise configs.ConfigError(f"schedule.patch must be progressive, whole or null, got {setting}")
    divisor = getattr(network, "divisor", None)
    obstacles = {
        "the data has values of whole images": not config.derived.per_voxel,
        f"model._target_={config.model['_target_']} does not tell what divides its input": divisor is None,
        f"scheduler._target_={config.scheduler['_target_']} knows no progress": not has_progress(config),
        "a run without an end has no progress": not _has_end(config.trainer),
    }
    obstacle = next((reason for reason, there in obstacles.items() if there), None)
    if setting == "progressive" and obstacle is not None:
        raise configs.ConfigError(f"schedule.patch=progressive: {obstacle}")
    # compiled code is for one size; each further one takes a minute
    wanted = not (perf.compile or perf.cuda_graphs) if setting is None else setting == "progressive"
    return GrowingPatch(divisor) if wanted and obstacle is None and divisor is not None else None


def has_progress(config: RunConfig) -> bool:
    """Whether the schedule is one of ours, which know the progress of the run."""
    return str(config.scheduler["_target_"]).startswith(lr_schedulers.__name__ + ".")


def _has_end(trainer: TrainerConfig) -> bool:
    return trainer.max_epochs != -1 or trainer.max_steps != -1 or trainer.max_time is not None


def _validation(config: RunConfig, targets: Targets, network: nn.Module, store: Store | None) -> Validation:
    dims = config.derived.spatial_dims
    seen = training_axes(config.augmentation, dims)
    axes = usable_axes(config.task.mirror_axes, dims, seen, mirror_axes(network))
    window = window_of(config.task, config.derived, axes, config.data.convention)
    if isinstance(targets, ImageLevelTargets):
        return ImageLevelValidation(targets, flips(window.mirror_axes))
    assert isinstance(targets, SegmentationTargets)

    def to_native(logits: Tensor, case: str) -> np.ndarray:
        assert store is not None
        return restore(logits, store.crop_info(case), targets.decode)

    return LabelMapValidation(window, targets, to_native)


def _network(config: RunConfig, targets: Targets, load: Callable[..., Any] | None) -> nn.Module:
    """The network with its switches applied, and its frozen parameters frozen."""
    derived, freezing = config.derived, config.init.freeze
    network = targets.finish(build_network(config.model, config.conv, derived, load=load))
    pairs, names = configs.lists_to_tuples(derived.flip_label_pairs or []), derived.class_names
    axis, equivariant = left_right_axis(derived.slice_axis), mirror_axes(network)
    left_right.check_equivariance(pairs, names, axis, equivariant)
    if freezing:
        log.info("%s stay as they are", freeze(network, freezing))
    seen = training_axes(config.augmentation, derived.spatial_dims)
    left_right.warn_of_lookalikes(targets, names, pairs, axis, seen, equivariant)
    apply_switches(network, **{key: getattr(config.perf, key) for key in _SWITCHES})
    if config.trainer.deterministic:
        swap_pools(network)
    return network


def record_of(config: RunConfig, prepared: PreparedData) -> Node:
    """What every checkpoint carries; plain values only."""
    return {
        "config": config.plain(),
        "preprocessing": {
            key: configs.tuples_to_lists(value) for key, value in asdict(prepared.preprocessing).items()
        },
        "dataset": prepared.dataset.name,
        "train_cases": [case.id for case in prepared.train],
        "class_names": list(prepared.dataset.class_names),
        "targets": config.derived.targets,
        "modalities": list(prepared.dataset.modalities),
        "spacing_range_mm": configs.tuples_to_lists(prepared.spacing_range_mm),
        "validation": {},
    }
