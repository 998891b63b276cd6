"""Builds the task of a run from a resolved config: network, loss, optimizer, schedule, validation."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

import medconv
from medconv import config as configs
from medconv.config import Node, RunConfig
from medconv.convs import mirror_axes
from medconv.data import left_right
from medconv.data.left_right import left_right_axis
from medconv.inference.sliding_window import training_axes, usable_axes, window_of
from medconv.models.build import build_network
from medconv.models.freeze import check_factors, description, freeze, frozen_part, has_fixed_norms
from medconv.models.layers.max_pool import swap_pools
from medconv.performance.checkpointing import compute_in_parts
from medconv.performance.switches import apply_switches, memory_format
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.data_setup import PreparedData
from medconv.training.distributed import has_parts
from medconv.training.growing_patch import growing_patch_of, may_grow
from medconv.training.losses.fit import FittedLoss
from medconv.training.optim.build import build_optimizer, with_lr_multipliers
from medconv.training.task import Mixup, Task
from medconv.training.validation import LabelMapValidation, Validation

log = logging.getLogger(__name__)

# Keys of `perf` that change the network's modules, in the words of `apply_switches`.
_SWITCHES = (
    "channels_last",
    "fast_norm",
    "fast_depthwise",
    "activation_checkpointing",
    "compile",
    "cuda_graphs",
)


@configs.arguments_as_keys("task", "init")
def build_task(config: RunConfig, record: Node, load: Callable[..., Any] | None = None) -> Task:
    """The task of a resolved config: network, loss, optimizer, schedule and validation.

    Args:
        load: loads pretrained weights into the network.
    Raises:
        ConfigError: a class cannot be built from its node, or settings contradict each other.
    """
    derived = config.derived
    targets = Targets.from_plain(derived.targets)
    learns_numbers = targets.unbounded or (targets.of_table is not None and targets.of_table.unbounded)
    if learns_numbers and str(config.trainer.precision) in ("bf16-true", "16-true"):
        raise configs.ConfigError(
            f"trainer.precision={config.trainer.precision} rounds the numbers to learn, as it does all of a "
            "batch; take bf16-mixed or 32-true"
        )
    network = _network(config, targets, load)
    thaws = config.init.thaw_at is not None
    make_optimizer = build_optimizer(config.optimizer, config.trainer, config.perf.fused_optimizer, thaws)
    if config.init.lr_multipliers:
        check_factors(config.init.lr_multipliers, network)
        make_optimizer = with_lr_multipliers(make_optimizer, network, config.init.lr_multipliers)
    mixup: Mixup | None = None
    if config.task.mixup:
        make_mixup = targets.family.own("mixup")
        if make_mixup is None:
            raise configs.ConfigError(
                f"task.mixup={config.task.mixup} is for image-level targets, but the data has {targets.kind} "
                "targets"
            )
        mixup = make_mixup(config.task.mixup, config.seed)
    loss = FittedLoss(configs.build(config.loss, "loss"), targets, derived.spatial_dims)
    axes: tuple[int, ...] = ()  # of mirror test-time augmentation
    if config.task.mirror_axes:
        augmented_axes = training_axes(config.augmentation, derived.spatial_dims)
        equivariant_axes = mirror_axes(network)
        axes = usable_axes(config.task.mirror_axes, derived.spatial_dims, augmented_axes, equivariant_axes)
    window = window_of(config.task, derived, axes, config.data.convention)
    own_validation = targets.family.own("validation")
    validation: Validation
    if own_validation:
        validation = own_validation(config, targets, window)
    else:
        assert isinstance(targets, SegmentationTargets)
        validation = LabelMapValidation(window, targets, whole_batches=bool(config.perf.compile))
    return Task(
        network=network,
        loss=loss,
        optimizer=make_optimizer,
        scheduler=configs.errors_with_key("scheduler", configs.build(config.scheduler, "scheduler")),
        targets=targets,
        validation=validation,
        record=record,
        deep_supervision=config.task.deep_supervision,
        growing_patch=growing_patch_of(config, getattr(network, "divisor", None)),
        mixup=mixup,
        memory_format=memory_format(bool(config.perf.channels_last), derived.spatial_dims),
    )


def _network(config: RunConfig, targets: Targets, load: Callable[..., Any] | None) -> nn.Module:
    """The network with its switches applied, and its frozen parameters frozen."""
    network = build_network(config.model, config.conv, config.derived, load=load)
    network = targets.finish(network)
    equivariant_axes = mirror_axes(network)
    augmented_axes = training_axes(config.augmentation, config.derived.spatial_dims)
    if left_right_axis(config.derived.slice_axis) in (*equivariant_axes, *augmented_axes):
        _check_left_right(config, targets, equivariant_axes, augmented_axes)
    init = config.init
    if init.freeze and init.thaw_at is None:
        log.info("init.freeze: %s stay as they are", freeze(network, init.freeze))
        if config.trainer.sync_batchnorm and has_fixed_norms(network):
            raise configs.ConfigError(
                "trainer.sync_batchnorm=true replaces batch norms, also those whose statistics init.freeze "
                "keeps; take one of them"
            )
    elif init.freeze:  # frozen by the callback that thaws them
        until = f"stay as they are for {init.thaw_at:.0%} of the run (init.thaw_at)"
        log.info("init.freeze: %s %s", description(frozen_part(network, init.freeze), network), until)
    if has_parts(config):
        compute_in_parts(network, config.data.batch_size or 1)
    with configs.arguments_as_keys("perf"):
        switches = {key: getattr(config.perf, key) for key in _SWITCHES}
        apply_switches(
            network, **switches, shapes_grow=may_grow(config), sync_batchnorm=config.trainer.sync_batchnorm
        )
    if config.trainer.deterministic:
        swap_pools(network)
    return network


def _check_left_right(
    config: RunConfig, targets: Targets, equivariant_axes: Sequence[int], augmented_axes: Sequence[int]
) -> None:
    """Raises or warns if left and right structures look alike to a network that sees mirrored images.

    Raises:
        ConfigError: the network is equivariant to a mirroring that exchanges two classes.
    """
    derived = config.derived
    axis = left_right_axis(derived.slice_axis)
    pairs = configs.lists_to_tuples(derived.flip_label_pairs or [])
    class_names = derived.class_names
    if pairs and axis in equivariant_axes:
        left, right = (class_names[value] for value in pairs[0])
        raise configs.ConfigError(
            f"conv mirrors along axis {axis}, from left to right: such a network gives a mirrored image the "
            f"mirrored labels, so it cannot tell {left} from {right} (data.flip_label_pairs); "
            "choose other conv.axes, or another conv"
        )
    left_right.warn_of_lookalikes(targets, class_names, pairs, axis, augmented_axes, equivariant_axes)


def record_of(config: RunConfig, prepared: PreparedData) -> Node:
    """What every checkpoint carries under the key `medconv`; plain values only."""
    preprocessing = asdict(prepared.preprocessing)
    return {
        "version": medconv.__version__,
        "config": config.plain(),
        "preprocessing": {key: configs.tuples_to_lists(value) for key, value in preprocessing.items()},
        "dataset": prepared.dataset.name,
        "train_cases": [name for case in prepared.train for name in (case.id, case.own_id) if name],
        "class_names": list(prepared.dataset.class_names),
        "targets": config.derived.targets,
        "modalities": list(prepared.dataset.modalities),
        "spacing_range_mm": configs.tuples_to_lists(prepared.spacing_range_mm),
        "value_bands": [band and band.plain() for band in prepared.value_bands],
        "validation": {},
    }
