"""Unlabelled voxels: their label values in a file, and a batch without them, for losses that know none."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import Tensor, nn

from medconv.targets.base import label_values


def takes_mask(loss: Any) -> bool:
    """Whether a loss has an argument for the mask of labelled voxels."""
    function = type(loss).forward if isinstance(loss, nn.Module) else loss
    return _has_mask_argument(function)


def over_voxels(flags: Tensor, outputs: Tensor) -> Tensor:
    """Flags of each sample's outputs, for all of their voxels.

    Shape: (batch, outputs), outputs (batch, outputs, *spatial) -> (batch, outputs, 1, ...).
    """
    return flags.view(*flags.shape, *(1,) * (outputs.ndim - 2))


@lru_cache(maxsize=16)
def _has_mask_argument(function: Callable[..., Any]) -> bool:
    """Cached, since every step asks."""
    return "labelled" in signature(function).parameters


def labelled_row(values: Tensor, labelled: Tensor) -> Tensor:
    """The labelled voxels of all samples: (batch, channels, *spatial) -> (1, channels, voxels, 1, ...)."""
    # channels last, so that the mask takes whole voxels
    row = values.movedim(1, -1)[labelled[:, 0]].T
    trailing_ones = (1,) * (values.ndim - 3)
    return row.reshape(1, *row.shape, *trailing_ones)


def ignored_values(
    content: Mapping[str, Any], values: Sequence[Sequence[int]]
) -> tuple[int | None, tuple[int, ...]]:
    """`ignore` and `also_ignored` of an untrusted file.

    Raises:
        ValueError: not label values, or those of a class.
    """
    ignore = content["ignore"]
    also_ignored = tuple(label_values(content.get("also_ignored", ())))
    ignored = label_values([] if ignore is None else [ignore, *also_ignored])
    of_classes = {value for group in values for value in group}
    if of_classes & set(ignored) or (also_ignored and ignore is None):
        raise ValueError("the label value to ignore must not be a class")
    return ignore, also_ignored
