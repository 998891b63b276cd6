"""Mirror test-time augmentation: which axes to flip, and swapping the logits of left and right."""

import logging
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from medconv.config import Node, arguments_as_keys
from medconv.data.augmentation.spatial import check_axes, mirrored_axes
from medconv.utils.errors import ArgumentError

log = logging.getLogger(__name__)


def usable_axes(
    requested: Any, spatial_dims: int, trained_axes: Sequence[int], equivariant_axes: Sequence[int]
) -> tuple[int, ...]:
    """The requested axes of mirror test-time augmentation without the equivariant ones, which change nothing.

    Args:
        requested: axes, `all` or None.
        spatial_dims: of the network, 2 or 3.
        trained_axes: axes along which the network saw mirrored images in training.
        equivariant_axes: axes along which a mirrored image gives mirrored logits by construction.
    Raises:
        ArgumentError: not spatial axes, or an axis that is neither, so that averaging over flips would make
            predictions worse.
    """
    if requested is None:
        requested = ()
    elif requested == "all":
        requested = range(spatial_dims)
    axes = check_axes("mirror_axes", requested, spatial_dims)

    # averaging over flips that a network never saw makes its predictions worse
    unseen = [axis for axis in axes if axis not in trained_axes and axis not in equivariant_axes]
    if unseen:
        problem = (
            f"={list(axes)} needs a network trained on mirrored images: add {unseen} to "
            f"augmentation.mirror_axes (now {list(trained_axes)}), or use conv=mirror along them"
        )
        raise ArgumentError("mirror_axes", problem)

    skipped = [axis for axis in axes if axis in equivariant_axes]
    if skipped:
        log.info("mirror_axes: %s skipped, the network is equivariant along them", skipped)
    return tuple(axis for axis in axes if axis not in equivariant_axes)


def training_axes(augmentation: Node, spatial_dims: int) -> tuple[int, ...]:
    """Axes along which the network sees mirrored images in training. Raises: ValueError: no such axes."""
    with arguments_as_keys(mirror_axes="augmentation.mirror_axes"):
        return mirrored_axes(augmentation.get("mirror_axes") or (), spatial_dims)


def swapped(logits: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """The logits (batch, classes, *spatial) with the classes of each pair exchanged."""
    if not pairs:
        return logits
    order = list(range(logits.shape[1]))
    for left, right in pairs:
        order[left] = right
        order[right] = left
    return logits[:, order]


def flips(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All sets of the axes, the empty one first."""
    subsets: list[tuple[int, ...]] = []
    for count in range(len(axes) + 1):
        subsets.extend(combinations(sorted(axes), count))
    return subsets
