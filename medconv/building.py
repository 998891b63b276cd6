"""The network of a config (`model`, with its `conv`, and its first weights), its loss and its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn

from medconv import config as configs
from medconv import sides
from medconv.config import ConfigError
from medconv.convs import mirror_axes, plain, swap_convs
from medconv.data.sampling import check_axes, mirrored_axes
from medconv.losses import Targeted
from medconv.networks import full_resolution, in_units
from medconv.outcome_losses import ForOutcome
from medconv.outcomes import Outcome
from medconv.targets import Targets

log = logging.getLogger(__name__)
Values = dict[str, Any]
Builder = Callable[[Values, str], Any]
_WITH_DECODER, _WITHOUT = "medconv.networks.UNet", "medconv.networks.Encoder"


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
            turned = values["facts"].get("outcome") and "Mirror cannot" in str(error)
            raise ConfigError(f"conv: {error}{'; model=encoder keeps the symmetry' if turned else ''}") from error
        _probe(network, values["facts"], patch_size)
    sides.check_equivariance(values["facts"], mirror_axes(network))
    if not projects and load is not None:
        load(network)
    outcome = outcome_of(values["facts"])
    if outcome is not None and outcome.kind == "numbers":
        in_units(network, values["facts"]["value_means"], values["facts"]["value_stds"])
    return network


def outcome_of(facts: Values) -> Outcome | None:
    """What is asked of whole images; None: label maps."""
    plain = facts["outcome"]
    return None if plain is None else Outcome.from_plain(plain)


def check_task(task: Values, outcome: Outcome | None, dataset: str) -> None:
    """Raises: ConfigError: a task that is not for what a dataset has; says which is."""
    kinds = getattr(get_object(str(task["_target_"])), "kinds", None)
    if kinds is None or (outcome.kind in kinds if outcome else not kinds):
        return
    has = f"{outcome.kind} of whole images ({', '.join(outcome.names[:5])})" if outcome else "label maps"
    fitting = "segmentation" if outcome is None else "regression" if outcome.kind == "numbers" else "classification"
    wanted = " or ".join(kinds) + " of whole images" if kinds else "label maps"
    raise ConfigError(
        f"task: {task['_target_']} is for {wanted}, and {dataset} has {has}; take task={fitting}"
        + ("" if outcome else ", or data=imagefolder, csv or medmnist")
    )


def model_of(values: Values) -> Values:
    """The `model` node; of whole images our U-Net is its encoder, whose arguments are the same."""
    node = values["model"]
    without = values["facts"].get("outcome") is not None and node.get("_target_") == _WITH_DECODER
    return {**node, "_target_": _WITHOUT} if without else node


def fitted_loss(loss: Any, facts: Values) -> nn.Module:
    """A loss made to fit what the network is asked for. Raises: ValueError: it cannot be."""
    outcome = outcome_of(facts)
    if outcome is None:
        return Targeted(loss, Targets.from_plain(facts["targets"]), facts["spatial_dims"])
    return ForOutcome(loss, outcome, facts.get("value_means"), facts.get("value_stds"))


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
    whole = known.get("outcome") is not None
    wanted = (1, known["num_classes"], *(() if whole else patch_size))
    if shape != wanted:
        meant = "(batch, outputs)" if whole else "(batch, classes, *patch_size)"
        near = "model=resnet, densenet, efficientnet, senet or encoder" if whole else "model=customconv"
        raise ConfigError(f"model must return logits of shape {wanted} {meant}, it returns {shape}; {near} does")
