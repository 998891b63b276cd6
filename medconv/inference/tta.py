"""Mirror test-time augmentation: which axes to flip, and swapping the logits of left and right."""

import logging
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from medconv.config import ConfigError, Node
from medconv.data.augmentation.parameters import check_axes, mirrored_axes
from medconv.targets.image_level import ImageLevelTargets

log = logging.getLogger(__name__)


def usable_axes(
    requested: Any,
    dims: int,
    seen: Sequence[int],
    equivariant: Sequence[int],
    key: str = "task.mirror_axes",
) -> tuple[int, ...]:
    """The requested axes of mirror test-time augmentation without the equivariant ones, which change nothing.

    Args: requested: axes, `all` or None. seen: axes along which the network saw mirrored images in training.
        equivariant: axes along which a mirrored image gives mirrored logits by construction. key: that sets
        the axes, for messages.
    Raises: ConfigError: an axis that is neither, so that averaging over flips would make predictions worse.
    """
    wanted = range(dims) if requested == "all" else () if requested is None else requested
    axes = check_axes(key, wanted, dims)
    if skipped := [axis for axis in axes if axis in equivariant]:
        log.info("%s: %s skipped, the network is equivariant along them", key, skipped)
    unseen = [axis for axis in axes if axis not in (*seen, *equivariant)]
    if unseen:
        raise ConfigError(
            f"{key}={list(axes)} needs a network trained on mirrored images: add {unseen} to "
            f"augmentation.mirror_axes (now {list(seen)}), or use conv=mirror along them"
        )
    return tuple(axis for axis in axes if axis not in equivariant)


def training_axes(augmentation: Node, dims: int) -> tuple[int, ...]:
    """Axes along which the network sees mirrored images in training. Raises: ValueError: no such axes."""
    return mirrored_axes(augmentation.get("mirror_axes") or (), dims)


def swapped(logits: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """The logits (batch, classes, *spatial) with those of each pair of classes exchanged."""
    order = list(range(logits.shape[1]))
    for a, b in pairs:
        order[a], order[b] = b, a
    return logits[:, order] if pairs else logits


def flips(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All sets of the axes, the empty one first."""
    return [subset for count in range(len(axes) + 1) for subset in combinations(sorted(axes), count)]


def mean_over_flips(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    targets: ImageLevelTargets,
    axes_sets: Sequence[tuple[int, ...]],
) -> Tensor:
    """The decoded outputs, averaged over flips along these sets of spatial axes.

    Shape: (batch, channels, *spatial) -> (batch, names), float32.
    """
    outputs = [
        targets.decode(network(image.flip([2 + axis for axis in axes]) if axes else image))
        for axes in axes_sets
    ]
    return torch.stack(outputs).mean(0)
