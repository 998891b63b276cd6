"""Builds a run from a resolved config: network, task, data and trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import lightning as L
from torch import nn

from medconv import config as configs
from medconv.config import Values
from medconv.convs import mirror_axes
from medconv.data import left_right
from medconv.data.loading.datamodule import DataModule
from medconv.data.preprocessing.preprocess import restore
from medconv.inference.tta import test_time_axes, training_axes
from medconv.models.build import build_network
from medconv.models.layers.max_pool import swap_pools
from medconv.models.pretrained.freeze import check_factors, freeze
from medconv.performance.step_profiler import StepProfiler
from medconv.performance.switches import apply_switches, memory_format
from medconv.targets.image_level import image_targets_of
from medconv.training import report
from medconv.training.data_setup import PreparedData, data_module
from medconv.training.losses.build import fitted_loss
from medconv.training.optim.build import build_optimizer
from medconv.training.optim.param_groups import with_lr_multipliers
from medconv.training.run_dir import RunDir
from medconv.training.trainer import build_trainer
from medconv.utils import signals
from medconv.utils.hardware import apply_backends

log = logging.getLogger(__name__)

_SWITCHES = (
    "channels_last",
    "fast_norm",
    "fast_depthwise",
    "activation_checkpointing",
    "compile",
    "cuda_graphs",
)


def assemble(
    values: Values,
    prepared: PreparedData,
    folder: RunDir,
    stop_request: signals.StopRequest,
    load: Callable[..., Any] | None = None,
) -> tuple[L.Trainer, Any, DataModule, Any]:
    """Trainer, task, data and step profiler of a resolved config.

    Args: stop_request: of the run's signals. load: loads pretrained weights into the network.
    """
    derived, perf = values["derived"], values["perf"]
    network = _network(values, load)
    factors = values["init"]["lr_multipliers"] or {}
    check_factors(factors, network)
    task = configs.build(
        values["task"],
        "task",
        network=network,
        loss=fitted_loss(configs.build(values["loss"], "loss"), derived),
        optimizer=with_lr_multipliers(build_optimizer(values), network, factors),
        scheduler=configs.errors_with_key("scheduler", configs.build(values["scheduler"], "scheduler")),
        record=_record(values, prepared),
        memory_format=memory_format(perf["channels_last"], derived["spatial_dims"]),
        mirror_axes=test_time_axes(values, network),
        **_target_arguments(values, prepared),
    )
    profiler = StepProfiler(perf["profile"], folder.begun)
    trainer = build_trainer(values, folder, profiler, bool(prepared.val), stop_request)
    data = data_module(values, prepared, profiler, stop_request)
    report.announce(
        values, prepared.dataset.name, len(prepared.train), len(prepared.val), network, trainer, folder
    )
    return trainer, task, data, profiler


def _network(values: Values, load: Callable[..., Any] | None) -> nn.Module:
    """The network with its switches applied, and its frozen parameters frozen."""
    derived, perf, init = values["derived"], values["perf"], values["init"]
    network = build_network(values, derived["patch_size"], load=load)
    left_right.check_equivariance(derived, mirror_axes(network))
    if init["freeze"]:
        log.info("%s stay as they are", freeze(network, init["freeze"]))
    left_right.warn_of_lookalikes(derived, training_axes(values), mirror_axes(network))
    apply_backends(perf)
    apply_switches(network, **{key: perf[key] for key in _SWITCHES})
    if values["trainer"]["deterministic"]:
        swap_pools(network)
    return network


def _target_arguments(values: Values, prepared: PreparedData) -> Values:
    """Arguments of the task that depend on the kind of targets."""
    derived, image_targets = values["derived"], image_targets_of(values["derived"])
    if image_targets is not None:
        return {
            "image_targets": image_targets,
            "spatial_dims": derived["spatial_dims"],
            "seed": values["seed"],
        }
    return {
        "targets": prepared.targets,
        "patch_size": derived["patch_size"],
        "to_native": lambda logits, case: restore(
            logits, prepared.store.crop_info(case), prepared.targets.decode
        ),
        "slice_axis": derived["slice_axis"],
        "flip_label_pairs": configs.lists_to_tuples(derived["flip_label_pairs"] or []),
    }


def _record(values: Values, prepared: PreparedData) -> Values:
    """What every checkpoint carries; plain values only."""
    return {
        "config": values,
        "preprocessing": {
            key: configs.tuples_to_lists(value) for key, value in asdict(prepared.preprocessing).items()
        },
        "dataset": prepared.dataset.name,
        "class_names": list(prepared.dataset.class_names),
        "targets": values["derived"]["targets"],
        "image_targets": values["derived"]["image_targets"],
        "modalities": list(prepared.dataset.modalities),
        "spacing_range_mm": configs.tuples_to_lists(prepared.spacing_range_mm),
        "validation": {},
    }
