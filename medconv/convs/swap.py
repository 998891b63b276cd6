"""Put a convolution into any network, and fold it back to plain torch modules."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.convs.channel_transform import TwoLaunches
from medconv.convs.filter_banks import check_spacing
from medconv.convs.mirror import Mirror
from medconv.convs.parametrization import CONVS, TRANSPOSED, Foldable, Prior, UnsuitableLayerError, replace
from medconv.convs.share import shared
from medconv.utils.errors import explained

_FOLDED = 1e-3  # of a layer's largest output: how far what it folds to may be away


@dataclass
class SwapReport:
    """Which layers were swapped, why others were kept, errors of projected weights; `str()` is one line.

    Args: errors: layer to relative error (Frobenius norm) of its weight, for weights that were projected.
    """

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        kept = ", ".join(f"{count} {reason}" for reason, count in Counter(self.kept.values()).items())
        line = (
            f"{len(self.swapped)} convolutions swapped, {len(self.kept)} kept{f' ({kept})' if kept else ''}"
        )
        if values := self.errors.values():
            line += f"; weights kept with a relative error of {median(values):.2g}, {max(values):.2g} at most"
        return line


def plain(conv: nn.Module) -> nn.Module:
    """The library's convolution, as it is: `conv=none`."""
    return conv


def swap_convs(
    network: nn.Module,
    conv: Callable[..., Any],
    where: str | None = None,
    *,
    share: float = 1.0,
    spacing_mm: Sequence[float] | None = None,
    example: Tensor | None = None,
) -> SwapReport:
    """Replace, in place, every spatial convolution of a network.

    Args:
        network: any module. Kept: 1x1 and transposed convolutions, those whose kernel equals their stride
            (down-sampling), and those that `conv` cannot replace.
        conv: takes an `nn.ConvNd` and returns the module in its place; one of this package's functions, with
            its arguments bound by `functools.partial`. Or a `Mirror`, which converts the network as a whole.
        where: regular expression; only layers whose dotted name it matches (`re.search`) are swapped.
        share: of each layer's output channels; the others stay plain.
        spacing_mm: voxel size of the network's input, for convolutions sampled in mm. Each layer gets the
            voxel size of its own grid, as `spacing_mm` and `scale`; needs `example`.
        example: a typical input (batch, channels, *spatial); `Mirror` needs it, too.
    Raises: ValueError: nothing could be swapped, or `conv` refuses a layer (named in the message; earlier
        layers are swapped already, so build the network again).
    """
    check_part(conv, where, share)
    if isinstance(conv, Mirror):
        return _whole(network, conv, example)
    if share < 1:
        conv = cast(Any, partial(shared, conv=conv, share=share))
    grids = {} if spacing_mm is None else _grids(network, spacing_mm, example)
    report, owners = SwapReport(), _owners(network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, CONVS + TRANSPOSED):
            reason = _reason_to_keep(name, layer, where)
            if reason is None and owners[id(layer._parameters.get("weight"))] > 1:
                reason = "sharing its weight"
            try:
                if reason is None and spacing_mm is not None and name not in grids:
                    reason = "unused"
                new: Any = None if reason else conv(layer, **grids.get(name, {}))
                if reason is None and not isinstance(new, nn.Module):
                    raise ValueError(f"it must return a module, it returned a {type(new).__name__}")
            except UnsuitableLayerError as error:
                reason = error.reason
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}" if name else str(error)) from error
            if reason:
                report.kept[name] = reason
            else:
                replace(network, name, new.train(layer.training))
                report.swapped.append(name)
                if hasattr(new, "approximation_error"):
                    report.errors[name] = new.approximation_error
    if not report.swapped:
        raise ValueError(f"no convolution of {type(network).__name__} could be swapped: {report}")
    return report


def check_part(conv: Callable[..., Any], where: str | None, share: float) -> None:
    """Raises: ValueError: no such layers or share of them, or parts of a network for `Mirror`."""
    if not (isinstance(share, (int, float)) and 0 < share <= 1):
        raise ValueError(f"share must be a number, more than 0 and at most 1, got {share}")
    try:
        re.compile(where or "")
    except (re.error, TypeError) as error:
        raise ValueError(f"where must be a regular expression, got {where!r}: {error}") from error
    if (conv is Mirror or isinstance(conv, Mirror)) and (where is not None or share < 1):
        key, value = ("share", "1") if where is None else ("where", "null")
        got = share if where is None else repr(where)
        raise ValueError(f"conv=mirror converts the whole network, conv.{key} must be {value}, got {got}")


def fold_convs(network: nn.Module) -> nn.Module:
    """A copy of the network in plain torch modules: each weight-space prior is folded into an `nn.ConvNd`."""
    folded = deepcopy(network)
    if isinstance(folded, Foldable):
        return folded.folded()
    layers: list[tuple[str, Any]] = list(folded.named_modules())
    # All kernels first: several may be computed from one parameter.
    computed = [(layer, key) for _, layer in layers for key in _ours(layer)]
    kernels = [getattr(layer, key).detach().clone() for layer, key in computed]
    for (layer, key), kernel in zip(computed, kernels, strict=True):
        _fold(layer, key, kernel)
    for name, layer in layers:
        if isinstance(layer, Foldable):
            replace(folded, name, layer.folded())
    return folded


@torch.no_grad()
def check_folds(network: nn.Module, example: Tensor) -> None:
    """Run the network and compare each layer of another package that folds with what it folds to.

    Args: network: in evaluation mode. example: an input of it.
    Raises: ValueError: `folded()` of a layer, which is named, computes something else.
    """
    own = [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, Foldable) and not type(layer).__module__.startswith("medconv.")
    ]
    folded = {name: deepcopy(layer).folded().eval() for name, layer in own}
    inputs: dict[str, Any] = {}

    def keep(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[name] = deepcopy((args, kwargs))  # the layer may change them

    def compare(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        what = f"layer {name}: what folded() of {type(layer).__name__} returns"
        with explained(f"{what} cannot take the layer's input"):
            other = folded[name](*inputs[name][0], **inputs[name][1])
        same = other.shape == output.shape
        away = float((other - output).abs().max() / output.abs().max().clamp_min(1e-6)) if same else math.inf
        if not away < _FOLDED:
            raise ValueError(
                f"{what} computes something else than the layer, by {away:.2g} of its largest output; "
                "predictions and exports use it"
            )

    hooks = [layer.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, layer in own]
    hooks += [layer.register_forward_hook(partial(compare, name), with_kwargs=True) for name, layer in own]
    try:
        if hooks:
            network(example)
    finally:
        for hook in hooks:
            hook.remove()


def _ours(layer: Any) -> list[str]:
    """The parameters of a layer that this package's parametrizations compute."""
    parametrized = layer.parametrizations.items() if parametrize.is_parametrized(layer) else ()
    return [key for key, parts in parametrized if any(isinstance(part, Prior) for part in parts)]


def _fold(layer: Any, key: str, kernel: Tensor) -> None:
    """Remove a parametrization and leave what it computed."""
    learns = any(p.requires_grad for p in layer.parametrizations[key].parameters())
    # Removal deletes the property from the layer's class, which `deepcopy` let the original share.
    cls = type(layer)
    layer.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
    several = not hasattr(layer.parametrizations[key], "original")  # then torch can only leave the kernel
    parametrize.remove_parametrizations(layer, key, leave_parametrized=several)
    setattr(layer, key, nn.Parameter(kernel, requires_grad=learns))
    if type(layer).__mro__[1] is TwoLaunches:
        layer.__class__ = type(layer).__bases__[1]


def _whole(network: nn.Module, mirror: Mirror, example: Tensor | None) -> SwapReport:
    if example is None:
        raise ValueError("conv=mirror needs `example`, an input of the network, got None")
    changed = mirror(network, example)
    if not changed:
        raise ValueError(f"no convolution of {type(network).__name__} could be swapped")
    layers: dict[str, Any] = dict(network.named_modules())
    unused = {n: "unused" for n in layers.keys() - set(changed) if isinstance(layers[n], CONVS + TRANSPOSED)}
    errors = {n: layers[n].approximation_error for n in changed if hasattr(layers[n], "approximation_error")}
    return SwapReport(changed, unused, errors)


@torch.no_grad()
def _grids(
    network: nn.Module, spacing_mm: Sequence[float], example: Tensor | None
) -> dict[str, dict[str, Any]]:
    """For each convolution the voxel size of its grid, and how much coarser that is than the input's."""
    if example is None or example.ndim != len(spacing_mm) + 2:
        got = None if example is None else tuple(example.shape)
        raise ValueError(
            f"spacing_mm={tuple(spacing_mm)} needs an example of {len(spacing_mm)} spatial axes, got {got}"
        )
    check_spacing(spacing_mm)
    copy = deepcopy(network).eval()
    sizes: dict[str, torch.Size] = {}

    def note(name: str, layer: nn.Module, args: tuple[Tensor]) -> None:
        sizes.setdefault(name, args[0].shape[2:])

    for name, layer in copy.named_modules():
        if isinstance(layer, CONVS):
            layer.register_forward_pre_hook(partial(note, name))
    copy(example)
    grids = {}
    for name, size in sizes.items():
        steps = [max(1, round(n / m)) for n, m in zip(example.shape[2:], size, strict=True)]
        layer_mm = [mm * step for mm, step in zip(spacing_mm, steps, strict=True)]
        grids[name] = {"spacing_mm": tuple(layer_mm), "scale": min(layer_mm) / min(spacing_mm)}
    return grids


def _owners(network: nn.Module) -> Counter[int]:
    """How many convolutions share each weight; computed weights are not counted."""
    layers = [layer for layer in network.modules() if isinstance(layer, CONVS + TRANSPOSED)]
    weights = [layer._parameters.get("weight") for layer in layers]
    return Counter(id(weight) for weight in weights if weight is not None)


def _reason_to_keep(name: str, layer: Any, where: str | None) -> str | None:
    if isinstance(layer, TRANSPOSED):
        return "transposed"
    if all(k == 1 for k in layer.kernel_size):
        return "1x1"
    if layer.kernel_size == layer.stride:
        return "down-sampling by its kernel"
    if where is not None and not re.search(where, name):
        return f"not matched by {where!r}"
    return None
