"""Exchange the norms of a network for those that keep channels-last, fused with the activation after them."""

from collections import Counter
from itertools import pairwise
from typing import Any

from torch import nn

from medconv.models.layers.fast_norm import (
    ChannelsLastBatchNorm2d,
    ChannelsLastBatchNorm3d,
    ChannelsLastGroupNorm,
    ChannelsLastInstanceNorm2d,
    ChannelsLastInstanceNorm3d,
    ChannelsLastNorm,
)

_SWAPS: dict[type, type] = {
    nn.BatchNorm2d: ChannelsLastBatchNorm2d,
    nn.BatchNorm3d: ChannelsLastBatchNorm3d,
    nn.GroupNorm: ChannelsLastGroupNorm,
    nn.InstanceNorm2d: ChannelsLastInstanceNorm2d,
    nn.InstanceNorm3d: ChannelsLastInstanceNorm3d,
}
SWAPPED = tuple(_SWAPS)
_BATCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d)


def swap_norms(network: nn.Module, fuse: bool = True, keep_batch_norms: bool = False) -> int:
    """Make every instance, group and batch norm keep channels-last, in place; returns their number.

    Parameters, buffers, state dict and training flags stay. Instance norms with running statistics and norms
    with a forward of their own are not changed.

    Args:
        fuse: move a ReLU or leaky ReLU that follows such a norm into it and replace it by `nn.Identity`;
            only in subclasses of `nn.Sequential`, because others may iterate over a plain one, and only if
            neither layer is used elsewhere or has hooks.
        keep_batch_norms: leave those to torch, which replaces them by `nn.SyncBatchNorm`: that would lose
            their activation.
    """
    swapped = 0
    for layer in network.modules():
        norm: Any = layer
        if _is_swappable(norm) and not (keep_batch_norms and isinstance(norm, _BATCH_NORMS)):
            norm.__class__ = _SWAPS[type(norm)]
            swapped += 1
    if fuse:
        registrations: Counter[int] = Counter()
        for parent in network.modules():
            registrations.update(id(child) for child in parent._modules.values())
        for parent in network.modules():
            if isinstance(parent, nn.Sequential) and _is_block(parent):
                _fuse(parent, registrations)
    return swapped


def _is_swappable(norm: Any) -> bool:
    if type(norm) not in _SWAPS or not _is_untouched(norm):
        return False
    return not (isinstance(norm, _INSTANCE_NORMS) and norm.track_running_stats)


def _fuse(parent: nn.Sequential, registrations: Counter[int]) -> None:
    """Move activations into the norms before them. `registrations`: uses of each module, by its id."""
    for (_, norm), (name, activation) in pairwise(list(parent._modules.items())):
        if not isinstance(norm, ChannelsLastNorm) or norm.negative_slope is not None:
            continue
        # not subclasses, which may compute something else
        if type(activation) not in (nn.LeakyReLU, nn.ReLU):
            continue
        is_used_once = registrations[id(norm)] == 1 and registrations[id(activation)] == 1
        if is_used_once and _is_bare(norm) and _is_bare(activation):
            # a ReLU has no slope attribute: it is a leaky one of slope 0
            slope = float(getattr(activation, "negative_slope", 0.0))
            norm.negative_slope = slope
            # in its place, so that the names of the layers after it stay
            parent._modules[name] = nn.Identity().train(activation.training)


def _is_block(parent: nn.Sequential) -> bool:
    """Whether a subclass of `nn.Sequential` does nothing but run its layers one after another."""
    parent_class = type(parent)
    if parent_class is nn.Sequential or not _is_untouched(parent):
        return False
    has_own_forward = parent_class.forward is not nn.Sequential.forward
    has_own_iterator = parent_class.__iter__ is not nn.Sequential.__iter__
    return not has_own_forward and not has_own_iterator


def _is_untouched(layer: nn.Module) -> bool:
    """No forward was put on the object itself."""
    return "forward" not in vars(layer)


def _is_bare(layer: Any) -> bool:
    """Untouched, and nothing watches it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_hooks = any(getattr(layer, attribute, None) for attribute in hooks)
    return _is_untouched(layer) and not has_hooks
