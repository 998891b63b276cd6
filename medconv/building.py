"""The network of a config (`model`, with its `conv`, and its first weights), and its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from medconv import config as configs
from medconv import sides
from medconv.config import ConfigError
from medconv.convs import mirror_axes, plain, swap_convs
from medconv.data.sampling import check_axes, mirrored_axes
from medconv.networks.outputs import full_resolution

log = logging.getLogger(__name__)
Values = dict[str, Any]
Builder = Callable[[Values, str], Any]


def build_network(
    values: Values, patch_size: Sequence[int], build: Builder = configs.build, load: Callable[[nn.Module], Any] | None = None
) -> nn.Module:
    """The `model` with its `conv`, tried once on an empty patch.

    Args:
        build: `trust.build_trusted` for a config that came with a file.
        load: puts first weights into the plain network where `conv.keep_weight` projects them into the convolution, else
            into the network as it is.
    Raises: ConfigError: arguments that do not fit, or a network that cannot take the patch or returns another shape.
    """
    network = build(values["model"], "model")
    _probe(network, values["facts"], patch_size)
    settings = dict(values["conv"])
    projects = bool(settings.get("keep_weight"))
    if projects and load is not None:
        load(network)
    where, spacing_mm = settings.pop("where", None), settings.pop("spacing_mm", None)
    conv = build(settings, "conv")
    if getattr(conv, "func", conv) is not plain:
        example = torch.zeros(2, values["facts"]["num_channels"], *patch_size)
        try:
            log.info("conv: %s", swap_convs(network, conv, where, spacing_mm=spacing_mm, example=example))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"conv: {error}") from error
        _probe(network, values["facts"], patch_size)
    sides.check_equivariance(values["facts"], mirror_axes(network))
    if not projects and load is not None:
        load(network)
    return network


def build_optimizer(values: Values) -> Any:
    """The optimizer's class with its arguments, fused where it can be and nothing speaks against it.

    fp16's loss scaling and gradient clipping exclude each other in a fused optimizer; torch's fused SGD knows no weights
    that are divided over devices.
    Returns: a function of the parameters.
    """
    optimizer = configs.build(values["optimizer"], "optimizer")
    known = signature(getattr(optimizer, "func", optimizer)).parameters
    clips = bool(values["trainer"]["gradient_clip_val"]) and str(values["trainer"]["precision"]).startswith("16")
    divided = values["trainer"]["strategy"] == "fsdp" and getattr(optimizer, "func", optimizer) is torch.optim.SGD
    given = getattr(optimizer, "keywords", {})
    allowed = values["perf"]["fused_optimizer"] and not clips and not divided
    if allowed and "fused" in known and not {"fused", "foreach"} & given.keys():
        optimizer = partial(optimizer.func, **given, fused=True)
    return configs.naming("optimizer", optimizer)


def test_time_axes(values: Values, network: nn.Module) -> tuple[int, ...]:
    """Axes of mirror test-time augmentation that can change something.

    Raises: ConfigError: an axis along which the network never saw a mirrored image, so that a mean over flips would harm.
    """
    axes, dims = values["task"].get("mirror_axes"), values["facts"]["spatial_dims"]
    wanted = range(dims) if axes == "all" else () if axes is None else axes
    return usable_axes(wanted, dims, training_axes(values), mirror_axes(network))


def usable_axes(wanted: Sequence[int], dims: int, seen: Sequence[int], equivariant: Sequence[int]) -> tuple[int, ...]:
    """Of the axes wanted for mirror test-time augmentation, those that can change something.

    Args: seen: axes along which the network saw mirrored images in training. equivariant: by construction.
    Raises: ConfigError: an axis that is neither.
    """
    axes = check_axes("task.mirror_axes", wanted, dims)
    if skipped := [axis for axis in axes if axis in equivariant]:
        log.info("task.mirror_axes: %s skipped, the network is equivariant along them", skipped)
    unseen = [axis for axis in axes if axis not in (*seen, *equivariant)]
    if unseen:
        raise ConfigError(
            f"task.mirror_axes={list(axes)} needs a network that knows mirrored images: add {unseen} to "
            f"augment.mirror_axes (now {list(seen)}), or take conv=mirror along them"
        )
    return tuple(axis for axis in axes if axis not in equivariant)


def training_axes(values: Values) -> tuple[int, ...]:
    """Axes along which the network sees mirrored images in training. Raises: ValueError: no such axes."""
    return mirrored_axes(values["augment"].get("mirror_axes") or (), values["facts"]["spatial_dims"])


def _probe(network: nn.Module, known: Values, patch_size: Sequence[int]) -> None:
    empty = torch.zeros(1, known["num_channels"], *patch_size)
    was_training = network.training
    try:
        with torch.no_grad():
            shape = tuple(full_resolution(network.eval()(empty)).shape)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model cannot take data.patch_size={list(patch_size)}: {reason}") from error
    finally:
        network.train(was_training)
    wanted = (1, known["num_classes"], *patch_size)
    if shape != wanted:
        raise ConfigError(f"model must return logits of shape {wanted} (batch, classes, *patch_size), it returns {shape}")
