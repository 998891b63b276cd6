"""Build the network of a config: `model`, its `conv`, and pretrained weights."""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn

from medconv import config as configs
from medconv.config import ConfigError, Derived, Node
from medconv.convs.parametrization import check_folds, classes_that_stay, only_draws
from medconv.convs.swap import NetworkConversion, check_selection, is_plain, swap_convs
from medconv.models.outputs import evaluating, full_resolution
from medconv.utils.errors import first_line, reason

log = logging.getLogger(__name__)
Builder = Callable[[Node, str], Any]
KEYS_OF_SWAP_CONVS = ("where", "share", "spacing_mm")  # not of the class or function in `conv`
PLAIN_CONV = {"_target_": "medconv.convs.plain", "_partial_": True}  # as conv=none
_ROUND_UP = "; +model.divisible_by=32 would have patches planned in multiples of 32"


def build_network(
    model: Node,
    conv: Node,
    derived: Derived,
    build: Builder = configs.build,
    load: Callable[[nn.Module], Any] | None = None,
    weights_follow: bool = False,
) -> nn.Module:
    """Build `model` with its `conv`, and run it on an empty patch, unless a checkpoint's weights follow.

    Args:
        model: its key `divisible_by` is for the plan alone.
        conv: also has the keys `where`, `share` and `spacing_mm` of `swap_convs`.
        derived: sizes of patch, inputs and outputs.
        build: `trusted.build_trusted` for the config of a checkpoint.
        load: loads pretrained weights; before the convolutions are swapped if `conv.init_from_weights`
            projects them, else afterwards.
        weights_follow: those of a checkpoint, whose training has checked and logged what is swapped; a
            convolution that only draws new weights is left out.
    Raises:
        ConfigError: wrong arguments, or a network that cannot take the patch or returns another shape.
    """
    arguments = {key: value for key, value in model.items() if key != "divisible_by"}
    try:
        network: nn.Module = build(arguments, "model")
        if not weights_follow:
            # The plan has rounded the patch for a network that says by what it divides.
            is_rounded = "divisible_by" in model or hasattr(network, "divisor")
            hint = _ROUND_UP if derived.per_voxel and not is_rounded else ""
            _probe(network, derived, hint)
    except ImportError as error:  # MONAI imports what few networks need once it is used
        raise ConfigError(f"model: {model['_target_']} {_missing_package(error)}") from error
    # Pretrained weights are dense: a prior that projects them needs them first, others start anew.
    projects_weights = bool(conv.get("init_from_weights"))
    if projects_weights and load is not None:
        load(network)
    share = conv.get("share")
    own = {key: value for key, value in conv.items() if key not in KEYS_OF_SWAP_CONVS}
    swap = build(own, "conv")
    is_needless = only_draws(swap) and share in (None, 1) if weights_follow else is_plain(swap)
    if not is_needless:
        _swap(network, conv, swap, derived, weights_follow)
    if not projects_weights and load is not None:
        load(network)
    return network


def _swap(
    network: nn.Module, conv: Node, swap: Callable[..., Any], derived: Derived, weights_follow: bool
) -> None:
    """Put the convolution of a config into a network, and check that it still runs, and folds."""
    share = conv.get("share")
    # two samples: batch norm in training mode needs more than one value per channel
    example = torch.zeros(2, derived.num_channels, *derived.patch_size)
    try:
        report = swap_convs(
            network,
            swap,
            conv.get("where"),
            share=1.0 if share is None else share,
            spacing_mm=conv.get("spacing_mm"),
            example=example,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"conv: {error}") from error
    log.log(logging.DEBUG if weights_follow else logging.INFO, "conv: %s", report)
    if weights_follow:
        return
    if isinstance(swap, NetworkConversion):
        for doubt in swap.doubts(network):
            log.warning("conv: %s", doubt)
    _probe(network, derived, subject="conv: with it, model")
    if has_own_layers(network):
        check_folding(network, derived)
        _warn_of_layers_that_stay(network, report.swapped)


def _warn_of_layers_that_stay(network: nn.Module, swapped: Sequence[str]) -> None:
    """Layers of a user's that prediction and export cannot turn into plain torch modules."""
    classes = classes_that_stay(network, swapped)
    for kind in sorted(classes, key=lambda kind: kind.__qualname__):
        log.warning(
            "conv: %s.%s is not a Foldable, so it stays in predictions and exports, and costs there what it "
            "costs in training; give it a method folded() (medconv.convs.parametrization.Foldable)",
            kind.__module__,
            kind.__qualname__,
        )


def has_own_layers(network: nn.Module) -> bool:
    """Whether some layers are neither torch's nor of this package, whose folds are tested."""
    return any(not type(layer).__module__.startswith(("torch.", "medconv.")) for layer in network.modules())


def check_folding(network: nn.Module, derived: Derived) -> None:
    """Compare each layer of a user's that folds with what it folds to, on a random patch.

    Raises:
        ConfigError: one folds to something else, see `convs.parametrization.check_folds`.
    """
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(1, derived.num_channels, *derived.patch_size, generator=generator)
    try:
        with evaluating(network):
            check_folds(network, example)
    except ValueError as error:
        raise ConfigError(f"conv: {error}") from error


def check_conv(conv: Node) -> None:
    """Check the keys of `conv` that do not depend on the network.

    Raises:
        ConfigError: keys that the convolution cannot have, in any network.
    """
    swap = get_object(str(conv["_target_"]))
    share = conv.get("share")
    if is_plain(swap):
        for key, value in conv.items():
            is_default = value is None or (key, value) == ("share", 1.0)
            if not key.startswith("_") and not is_default:
                raise ConfigError(f"conv.{key}={value}: conv=none changes no layer and has no keys")
    try:
        check_selection(swap, conv.get("where"), 1.0 if share is None else share)
    except ValueError as error:
        raise ConfigError(f"conv: {error}") from error


def _missing_package(error: ImportError) -> str:
    """What a network misses, as the end of a sentence."""
    match = re.search(r"No module named '(\w+)", str(error))
    if match is None:
        return f"cannot be imported: {reason(error)}"
    return f"needs the package {match[1]}: pip install {match[1]}"


def _probe(network: nn.Module, derived: Derived, hint: str = "", subject: str = "model") -> None:
    """Run a network on an empty patch and check what it returns.

    Raises:
        ConfigError: it cannot take the patch, or returns something else than logits of the right shape.
    """
    empty = torch.zeros(1, derived.num_channels, *derived.patch_size)
    try:
        # in evaluation mode, where batch norm takes one sample and statistics stay
        with torch.no_grad(), evaluating(network):
            output = network(empty)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{subject} cannot take data.patch_size={list(derived.patch_size)}: {first_line(error)}{hint}"
        ) from error
    try:
        logits = full_resolution(output)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if derived.per_voxel:
        expected = (1, derived.num_classes, *derived.patch_size)
        axes = "(batch, classes, *patch_size)"
        suitable = "model=customconv"
    else:
        expected = (1, derived.num_classes)
        axes = "(batch, outputs)"
        suitable = "model=resnet, densenet, efficientnet, senet or encoder"
    shape = tuple(logits.shape)
    if shape != expected:
        raise ConfigError(
            f"{subject} must return logits of shape {expected} {axes}, it returns {shape}; {suitable} does"
        )
    if not logits.is_floating_point():
        raise ConfigError(f"{subject} must return logits in floating point, it returns {logits.dtype}")
