"""Build the network of a config: `model`, its `conv`, and pretrained weights."""

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn

from medconv import config as configs
from medconv.config import ConfigError, Derived, Node
from medconv.convs import NotEquivariantError, plain, swap_convs
from medconv.convs.swap import check_folds, check_part
from medconv.models.outputs import evaluating, full_resolution
from medconv.utils.errors import first_line, reason

log = logging.getLogger(__name__)
Builder = Callable[[Node, str], Any]
_WITH_DECODER, _WITHOUT = "medconv.models.UNet", "medconv.models.Encoder"
_ROUND_UP = "; +model.divisible_by=32 would have patches planned in multiples of 32"


def build_network(
    model: Node,
    conv: Node,
    derived: Derived,
    build: Builder = configs.build,
    load: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Build `model` with its `conv` and run it once on an empty patch.

    Args:
        model: its key `divisible_by` is for the plan alone.
        build: `trusted.build_trusted` for the config of a checkpoint.
        load: loads pretrained weights; before the convolutions are swapped if `conv.init_from_weights`
            projects them, else afterwards.
    Raises: ConfigError: wrong arguments, or a network that cannot take the patch or returns another shape.
    """
    try:
        network: nn.Module = build({k: v for k, v in model.items() if k != "divisible_by"}, "model")
        unknown = derived.per_voxel and "divisible_by" not in model and not hasattr(network, "divisor")
        _probe(network, derived, _ROUND_UP if unknown else "")
    except ImportError as error:  # MONAI imports what few networks need once it is used
        raise ConfigError(f"model: {model['_target_']} {_lacks(error)}") from error
    settings = dict(conv)
    projects = bool(settings.get("init_from_weights"))
    if projects and load is not None:
        load(network)
    where, spacing_mm = settings.pop("where", None), settings.pop("spacing_mm", None)
    share = settings.pop("share", None)
    swap = build(settings, "conv")
    if getattr(swap, "func", swap) is not plain:
        example = torch.zeros(2, derived.num_channels, *derived.patch_size)
        try:
            part = 1.0 if share is None else share
            report = swap_convs(network, swap, where, share=part, spacing_mm=spacing_mm, example=example)
            # of a checkpoint's network its training has said it
            log.log(logging.INFO if build is configs.build else logging.DEBUG, "conv: %s", report)
        except (TypeError, ValueError) as error:
            turned = not derived.per_voxel and isinstance(error, NotEquivariantError)
            raise ConfigError(
                f"conv: {error}{'; model=encoder keeps the symmetry' if turned else ''}"
            ) from error
        _probe(network, derived, of="conv: with it, model")
        check_folding(network, derived)
    if not projects and load is not None:
        load(network)
    return network


def check_folding(network: nn.Module, derived: Derived) -> None:
    """Raises: ConfigError: a layer of a user's folds to something else, see `convs.swap.check_folds`."""
    shape, generator = (1, derived.num_channels, *derived.patch_size), torch.Generator().manual_seed(0)
    try:
        with evaluating(network):
            check_folds(network, torch.randn(shape, generator=generator))
    except ValueError as error:
        raise ConfigError(f"conv: {error}") from error


def check_conv(conv: Node) -> None:
    """Raises: ConfigError: keys of `conv` that the convolution cannot have, in any network."""
    swap, share = get_object(str(conv["_target_"])), conv.get("share")
    set_keys = [(key, value) for key, value in conv.items() if not key.startswith("_") and value is not None]
    unused = [f"{key}={value}" for key, value in set_keys if (key, value) != ("share", 1.0)]
    if swap is plain and unused:
        raise ConfigError(f"conv.{unused[0]}: conv=none changes no layer and has no keys")
    try:
        check_part(swap, conv.get("where"), 1.0 if share is None else share)
    except ValueError as error:
        raise ConfigError(f"conv: {error}") from error


def model_of(node: Node, per_voxel: bool) -> Node:
    """The `model` node; for image-level targets our U-Net becomes `Encoder`, which has the same arguments."""
    without = not per_voxel and node.get("_target_") == _WITH_DECODER
    return {**node, "_target_": _WITHOUT} if without else node


def _lacks(error: ImportError) -> str:
    """What a network misses, as a part of a sentence."""
    if found := re.search(r"No module named '(\w+)", str(error)):
        return f"needs the package {found[1]}: pip install {found[1]}"
    return f"cannot be imported: {reason(error)}"


def _probe(network: nn.Module, derived: Derived, hint: str = "", of: str = "model") -> None:
    patch_size = derived.patch_size
    empty = torch.zeros(1, derived.num_channels, *patch_size)
    try:
        with torch.no_grad(), evaluating(network):
            output = network(empty)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{of} cannot take data.patch_size={list(patch_size)}: {first_line(error)}{hint}"
        ) from error
    try:
        logits = full_resolution(output)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shape = tuple(logits.shape)
    image_level = not derived.per_voxel
    expected = (1, derived.num_classes, *(() if image_level else patch_size))
    if shape != expected:
        axes = "(batch, outputs)" if image_level else "(batch, classes, *patch_size)"
        near = "model=resnet, densenet, efficientnet, senet or encoder" if image_level else "model=customconv"
        raise ConfigError(
            f"{of} must return logits of shape {expected} {axes}, it returns {shape}; {near} does"
        )
    if not logits.is_floating_point():
        raise ConfigError(f"{of} must return logits in floating point, it returns {logits.dtype}")
