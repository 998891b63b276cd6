"""Put a convolution into any network, and fold it back to plain `nn.Conv` layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils import parametrize

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class SwapReport:
    """Which layers were swapped, and why the others were kept; `str()` is one line."""

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = Counter(self.kept.values())
        kept = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        return f"{len(self.swapped)} convolutions swapped, {len(self.kept)} kept" + (f" ({kept})" if kept else "")


def plain(conv: nn.Module) -> nn.Module:
    """The library's convolution, as it is: `conv=none`."""
    return conv


def swap_convs(network: nn.Module, conv: Callable[[nn.Module], nn.Module], where: str | None = None) -> SwapReport:
    """Replace, in place, every spatial convolution of a network.

    Args:
        network: any module; 1x1 and transposed convolutions stay, and so do those that already carry a prior.
        conv: takes an `nn.ConvNd` and returns the module in its place; one of this package's functions, with its
            arguments bound by `functools.partial`.
        where: regular expression; only layers whose dotted name it matches (`re.search`) are swapped.
    Raises: ValueError: nothing could be swapped, or `conv` refuses a layer (the message names it).
    """
    report = SwapReport()
    for name, layer in list(network.named_modules()):
        if isinstance(layer, CONVS + _TRANSPOSED):
            reason = _reason_to_keep(name, layer, where)
            if reason:
                report.kept[name] = reason
            else:
                _replace(network, name, _swapped(name, layer, conv))
                report.swapped.append(name)
    if not report.swapped:
        raise ValueError(f"no convolution of {type(network).__name__} could be swapped: {report}")
    return report


def fold_convs(network: nn.Module) -> nn.Module:
    """A copy of the network in which every weight-space prior is folded into a plain `nn.ConvNd`."""
    folded = deepcopy(network)
    for layer in folded.modules():
        if isinstance(layer, CONVS) and parametrize.is_parametrized(layer, "weight"):
            # Removal deletes the property from the layer's class, which `deepcopy` let the original share.
            cls = type(layer)
            layer.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return folded


def _reason_to_keep(name: str, layer: nn.Module, where: str | None) -> str | None:
    if isinstance(layer, _TRANSPOSED):
        return "transposed"
    if all(k == 1 for k in layer.kernel_size):  # type: ignore[union-attr]
        return "1x1"
    if layer.kernel_size == layer.stride:
        return "down-sampling by its kernel"
    if layer.groups > 1:  # type: ignore[operator]
        return "grouped"
    if parametrize.is_parametrized(layer, "weight"):
        return "parametrized already"
    if where is not None and not re.search(where, name):
        return f"not matched by {where!r}"
    return None


def _swapped(name: str, layer: nn.Module, conv: Callable[[nn.Module], nn.Module]) -> nn.Module:
    try:
        return conv(layer)
    except ValueError as error:
        raise ValueError(f"layer {name}: {error}") from error


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    if layer is network.get_submodule(name):  # changed in place
        return
    if not name:
        raise ValueError(f"a bare {type(network).__name__} cannot be replaced inside itself: call the conv on it")
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, layer)
