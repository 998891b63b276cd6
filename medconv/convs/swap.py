"""Put a convolution into any network."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from medconv.convs.filter_banks import check_spacing
from medconv.convs.parametrization import CONVS, TRANSPOSED, UnsuitableLayerError, draws_only, replace
from medconv.convs.share import shared


@dataclass
class SwapReport:
    """Which layers were swapped, why others were kept, errors of projected weights; `str()` is one line.

    Args:
        swapped: names of layers.
        kept: name of a layer to the reason.
        errors: layer to relative error (Frobenius norm) of its weight, for weights that were projected.
    """

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        line = f"{len(self.swapped)} convolutions swapped, {len(self.kept)} kept"
        if self.kept:
            counts = Counter(self.kept.values())
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
            line += f" ({reasons})"
        if self.errors:
            errors = self.errors.values()
            line += f"; weights kept with a relative error of {median(errors):.2g}, {max(errors):.2g} at most"
        return line


class NetworkConversion:
    """A convolution for a network as a whole, not for one layer after the other; a `conv` of `swap_convs`."""

    def __call__(self, network: nn.Module, example: Tensor) -> list[str]:
        """Convert a network in place. Returns: the convolutions changed, by name."""
        raise NotImplementedError

    def doubts(self, network: nn.Module) -> list[str]:
        """What a user should know before training a network that this has converted."""
        return []


@draws_only(unless="")
def plain(conv: nn.Module) -> nn.Module:
    """The library's convolution, as it is: `conv=none`."""
    return conv


def is_plain(conv: Callable[..., Any]) -> bool:
    """Whether a convolution is `plain`, also behind `functools.partial`, so that there is nothing to swap.

    `plain` is the null value of `conv`, as None is of other arguments; hence the comparison by identity.
    """
    function = conv.func if isinstance(conv, partial) else conv
    return function is plain


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
            its arguments bound by `functools.partial`. Or a `NetworkConversion`.
        where: regular expression; only layers whose dotted name it matches (`re.search`) are swapped.
        share: of each layer's output channels; the others stay plain.
        spacing_mm: voxel size of the network's input, for convolutions sampled in mm. Each layer gets the
            voxel size of its own grid, times its dilation, as `spacing_mm` and `scale`; needs `example`.
        example: a typical input (batch, channels, *spatial); a `NetworkConversion` needs it, too.
    Raises:
        ValueError: nothing could be swapped, or `conv` refuses a layer (named in the message; earlier
            layers are swapped already, so build the network again).
    """
    check_selection(conv, where, share)
    if isinstance(conv, NetworkConversion):
        return _convert_network(network, conv, example)
    if share < 1:
        conv = cast(Any, partial(shared, conv=conv, share=share))
    grids = None if spacing_mm is None else _grids(network, spacing_mm, example)
    report = _swap_layers(network, conv, where, grids)
    if not report.swapped:
        raise ValueError(f"no convolution of {type(network).__name__} could be swapped: {report}")
    return report


def check_selection(conv: Callable[..., Any], where: str | None, share: float) -> None:
    """Check which layers, and which share of their outputs, a convolution is for.

    Raises:
        ValueError: no such layers or share of them, or not all of a network for a `NetworkConversion`.
    """
    if not (isinstance(share, (int, float)) and 0 < share <= 1):
        raise ValueError(f"share must be a number, more than 0 and at most 1, got {share}")
    try:
        re.compile(where or "")
    except (re.error, TypeError) as error:
        raise ValueError(f"where must be a regular expression, got {where!r}: {error}") from error
    kind = conv if isinstance(conv, type) else type(conv)
    if not issubclass(kind, NetworkConversion):
        return
    if where is not None:
        raise ValueError(f"{kind.__name__} converts the whole network, where must be None, got {where!r}")
    if share < 1:
        raise ValueError(f"{kind.__name__} converts the whole network, share must be 1, got {share}")


def _swap_layers(
    network: nn.Module,
    conv: Callable[..., Any],
    where: str | None,
    grids: Mapping[str, Mapping[str, Any]] | None,
) -> SwapReport:
    """Replace the layers of a network one by one; `grids` as of `_grids`, None: `conv` needs none."""
    report = SwapReport()
    weights = (
        layer._parameters.get("weight")
        for layer in network.modules()
        if isinstance(layer, CONVS + TRANSPOSED)
    )
    # computed weights are not counted
    users = Counter(id(weight) for weight in weights if weight is not None)
    # a list: replacing layers would disturb the iteration
    for name, layer in list(network.named_modules()):
        if not isinstance(layer, CONVS + TRANSPOSED):
            continue
        reason = _reason_to_keep(name, layer, where)
        # None where a parametrization computes it
        weight = layer._parameters.get("weight")
        if reason is None and users[id(weight)] > 1:
            reason = "sharing its weight"
        if reason is None and grids is not None and name not in grids:
            reason = "unused"
        if reason is None and grids is not None and not grids[name]:
            reason = "of other dimensions"
        if reason is not None:
            report.kept[name] = reason
            continue
        try:
            new = conv(layer, **({} if grids is None else grids[name]))
            if not isinstance(new, nn.Module):
                raise ValueError(f"it must return a module, it returned a {type(new).__name__}")
        except UnsuitableLayerError as error:
            report.kept[name] = error.reason
            continue
        except ValueError as error:
            raise ValueError(f"layer {name}: {error}" if name else str(error)) from error
        new.train(layer.training)
        # others are changed in place
        if new is not layer:
            replace(network, name, new)
        report.swapped.append(name)
        projected = getattr(new, "approximation_error", None)
        if projected is not None:
            report.errors[name] = projected
    return report


def _convert_network(network: nn.Module, conversion: NetworkConversion, example: Tensor | None) -> SwapReport:
    if example is None:
        name = type(conversion).__name__
        raise ValueError(f"{name} needs `example`, an input of the network, got None")
    converted = conversion(network, example)
    if not converted:
        raise ValueError(f"no convolution of {type(network).__name__} could be swapped")
    report = SwapReport(swapped=converted)
    layers: dict[str, Any] = dict(network.named_modules())
    for name in converted:
        if hasattr(layers[name], "approximation_error"):
            report.errors[name] = layers[name].approximation_error
    for name in layers.keys() - set(converted):
        if isinstance(layers[name], CONVS + TRANSPOSED):
            report.kept[name] = "unused"
    return report


@torch.no_grad()
def _grids(
    network: nn.Module, spacing_mm: Sequence[float], example: Tensor | None
) -> dict[str, dict[str, Any]]:
    """For each convolution the distances of its taps, and by how much lengths in mm grow there.

    Taps are as far apart as the voxels of the layer's grid, times its dilation.

    Returns:
        Name of a layer to the arguments `spacing_mm` and `scale`; layers that did not run are missing, and
        those with another number of spatial axes are empty.
    """
    if example is None or example.ndim != len(spacing_mm) + 2:
        shape = None if example is None else tuple(example.shape)
        raise ValueError(
            f"spacing_mm={tuple(spacing_mm)} needs an example of {len(spacing_mm)} spatial axes, got {shape}"
        )
    check_spacing(spacing_mm)
    # the spatial size of each convolution's input in its first call; in a copy in evaluation mode, as the
    # batch norms must not count the example
    copy = deepcopy(network).eval()
    sizes: dict[str, torch.Size] = {}
    for name, layer in copy.named_modules():
        if isinstance(layer, CONVS):

            def note_size(_: nn.Module, args: Any, named: Any, name: str = name) -> None:
                image = args[0] if args else named["input"]
                sizes.setdefault(name, image.shape[2:])

            layer.register_forward_pre_hook(note_size, with_kwargs=True)
    copy(example)
    steps = [
        _steps(voxels, {size[axis] for size in sizes.values() if len(size) == len(spacing_mm)})
        for axis, voxels in enumerate(example.shape[2:])
    ]
    grids: dict[str, dict[str, Any]] = {}
    for name, size in sizes.items():
        if len(size) != len(spacing_mm):
            grids[name] = {}
            continue
        dilation: Sequence[int] = copy.get_submodule(name).dilation  # type: ignore[assignment]
        apart = [step_of[voxels] * each for step_of, voxels, each in zip(steps, size, dilation, strict=True)]
        layer_mm = tuple(mm * voxels for mm, voxels in zip(spacing_mm, apart, strict=True))
        # the largest, as axes that are halved less are those of coarse voxels, or of few
        grids[name] = {"spacing_mm": layer_mm, "scale": float(max(apart))}
    return grids


def _steps(image_voxels: int, layer_voxels: Collection[int]) -> dict[int, int]:
    """How many voxels of the image one voxel of a layer spans, by the number of the layer's voxels.

    From each size to the next smaller one, since a stride of 2 makes 5 of 9 voxels, then 3, then 2. Sizes
    that do not follow so are of parallel paths, such as pooling by 3 and by 5, where they divide the image.
    """
    steps = {}
    step, larger = 1, image_voxels
    for voxels in sorted(layer_voxels, reverse=True):
        if voxels < image_voxels:
            by_two = (larger // 2, -(-larger // 2))
            if voxels not in by_two and image_voxels % voxels == image_voxels % larger == 0:
                step = image_voxels // voxels
            else:
                step *= max(1, round(larger / voxels))
            larger = voxels
        steps[voxels] = step
    return steps


def _reason_to_keep(name: str, layer: Any, where: str | None) -> str | None:
    if isinstance(layer, TRANSPOSED):
        return "transposed"
    if all(size == 1 for size in layer.kernel_size):
        return "1x1"
    if layer.kernel_size == layer.stride:
        return "down-sampling by its kernel"
    if where is not None and not re.search(where, name):
        return f"not matched by {where!r}"
    return None
