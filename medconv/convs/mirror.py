"""`conv=mirror`: a whole network that is equivariant to reflections, f(flip x) = flip f(x).

Channels of a regular field come in 2, 4 or 8 copies, one per element of the group of flips along one, two or
three axes; a flip of the image flips each copy and swaps the copies. Copy h of field c is channel c * copies
+ h: the group index is innermost, so that fields can be concatenated. The first layers lift the image to
fields, the last map back to channels, and norms share their parameters among copies. Source: Cohen and
Welling 2016, arXiv:1602.07576.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from medconv.convs.equivariance import check_equivariance, fields, layers_with_channels
from medconv.convs.parametrization import (
    CONVS,
    TRANSPOSED,
    Foldable,
    Prior,
    WeightPrior,
    check_free,
    install,
    replace,
)

_AFFINE = (_BatchNorm, _InstanceNorm, nn.GroupNorm)


class MirrorPrior(WeightPrior):
    """The kernels of one layer of an equivariant network.

    Rows: first axis of the weight (outputs, or inputs of a transposed convolution); columns: the second.
        both regular:  W[(o,h), (i,g), k] = P[o, (i, gh), flip_h k]     1/copies of the parameters
        rows regular:  W[(o,h), i, k] = P[o, i, flip_h k]               (lifting; depthwise)
        columns regular: W[o, (i,g), k] = P[o, i, flip_g k]             (mapping back)
        neither:       W = mean over h of flip_h P
    Shape: original (rows' fields, taps, columns' fields or channels) -> weight (rows, columns, *kernel_size).
    Args: axes: spatial axes that are flipped.
    """

    def __init__(self, kernel_size: Sequence[int], axes: Sequence[int], rows: bool, columns: bool) -> None:
        super().__init__(kernel_size)
        self.axes, self.rows, self.columns = tuple(axes), rows, columns

    def taps(self, original: Tensor) -> Tensor:
        dims, steps = len(self.kernel_size), len(self.axes)
        kernel = original.unflatten(1, self.kernel_size)
        if self.rows and self.columns:
            kernel = kernel.unflatten(-1, (-1, *[2] * steps))
        for step, axis in enumerate(self.axes):
            # The row index h goes after the fields and the earlier axes' h, the column index g to the end.
            spatial = 1 + axis + (step if self.rows else 0)
            if self.rows and self.columns:
                group = 1 + step + dims + 1 + step
                kernel = torch.stack([kernel, kernel.flip(spatial, group)], 1 + step)
            elif self.rows:
                kernel = torch.stack([kernel, kernel.flip(spatial)], 1 + step)
            elif self.columns:
                kernel = torch.stack([kernel, kernel.flip(spatial)], -1)
            else:
                kernel = (kernel + kernel.flip(spatial)) / 2
        copies = 2**steps if self.rows else 1
        return kernel.reshape(original.shape[0] * copies, prod(self.kernel_size), -1)

    def nearest(self, taps: Tensor) -> Tensor:
        """The mean over the group, after each copy is flipped back to match the first."""
        steps = len(self.axes)
        kernel = taps.unflatten(1, self.kernel_size)
        if self.columns:
            kernel = kernel.unflatten(-1, (-1, *[2] * steps))
        if self.rows:
            kernel = kernel.unflatten(0, (-1, *[2] * steps))
        for step, axis in reversed(list(enumerate(self.axes))):
            spatial = 1 + axis + (step if self.rows else 0)
            if self.rows:
                first, second = kernel.unbind(1 + step)
                group = 1 + step + len(self.kernel_size) + 1 + step
                kernel = (first + (second.flip(spatial, group) if self.columns else second.flip(spatial))) / 2
            elif self.columns:
                first, second = kernel.unbind(-1)
                kernel = (first + second.flip(spatial)) / 2
            else:
                kernel = (kernel + kernel.flip(spatial)) / 2
        return kernel.reshape(kernel.shape[0], prod(self.kernel_size), -1)


class Repeat(Prior):
    """One value per field, repeated for its copies: biases, and the scale and shift of norms."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, original: Tensor) -> Tensor:
        return original.repeat_interleave(self.copies)

    def right_inverse(self, value: Tensor) -> Tensor:
        return value.detach().unflatten(0, (-1, self.copies)).mean(1)


class MirrorBatchNorm(Foldable):
    """Batch norm in which the copies of a field share parameters and statistics.

    Shape: (batch, fields * copies, *spatial) -> the same. Args: norm: a batch norm of `fields` channels.
    """

    def __init__(self, norm: _BatchNorm, copies: int) -> None:
        super().__init__()
        self.norm, self.copies = norm, copies
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        layout = torch.contiguous_format
        if x.ndim in (4, 5) and not x.is_contiguous():
            layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        fields = x.unflatten(1, (-1, self.copies)).flatten(
            2, 3
        )  # copies side by side along the first spatial axis
        return (
            self.norm(fields).unflatten(2, (self.copies, -1)).flatten(1, 2).contiguous(memory_format=layout)
        )

    def folded(self) -> nn.Module:
        """A plain batch norm over all channels."""
        cls = next(c for c in type(self.norm).__mro__ if c.__module__ == "torch.nn.modules.batchnorm")
        norm = self.norm
        affine, tracks = norm.affine, norm.track_running_stats
        plain = cls(norm.num_features * self.copies, norm.eps, norm.momentum, affine, tracks)
        state = {
            k: v if v.ndim == 0 else v.repeat_interleave(self.copies) for k, v in norm.state_dict().items()
        }
        return _like(plain, norm, state)


@dataclass(frozen=True)
class Mirror:
    """Makes a whole network equivariant to reflections; pass it to `swap_convs` as `conv`.

    Args:
        axes: spatial axes of the image, counted from 0, along which it may be flipped.
        init_from_weights: start from the present weights, averaged over the group, instead of drawing new
            ones.
    Raises: ValueError: no axis, a repeated or negative one; when called, an axis that the network does not
        have, channels that do not split into copies, or a layer that breaks the symmetry (named).
    Weights: a half, a quarter or an eighth of a plain network's, at equal width.
    """

    axes: Sequence[int] = (0,)
    init_from_weights: bool = False

    def __post_init__(self) -> None:
        if not self.axes or len(set(self.axes)) != len(self.axes) or min(self.axes) < 0:
            raise ValueError(f"axes must be different spatial axes, counted from 0, got {list(self.axes)}")

    def __call__(self, network: nn.Module, example: Tensor) -> list[str]:
        """Convert a network in place; if that fails, the network stays unchanged.

        Args: example: an input (batch, channels, *spatial). Returns: the convolutions changed, by name.
        """
        if max(self.axes) >= example.ndim - 2:
            raise ValueError(
                f"axes must lie below {example.ndim - 2}, the image's spatial axes, got {list(self.axes)}"
            )
        regular = fields(network, example)
        with torch.random.fork_rng():
            trial = deepcopy(network)
            self._convert_all(trial, regular)
            check_equivariance(trial, example, self.axes)
        return self._convert_all(network, regular)

    def _convert_all(self, network: nn.Module, regular: dict[str, tuple[bool, bool]]) -> list[str]:
        converted = []
        for name, layer in layers_with_channels(network):
            if name in regular:
                try:
                    _convert(network, name, layer, regular[name], self)
                    layer.train(layer.training)  # new parametrizations are in training mode
                except ValueError as error:
                    raise ValueError(f"layer {name}: {error}") from error
                converted.append(name)
        return [name for name in converted if isinstance(network.get_submodule(name), CONVS + TRANSPOSED)]


def mirror_axes(network: nn.Module) -> tuple[int, ...]:
    """The axes along which `conv=mirror` made a network equivariant; none for other networks and folded
    ones.
    """
    return next((layer.axes for layer in network.modules() if isinstance(layer, MirrorPrior)), ())


def equivariant_head(layer: nn.Module, axes: Sequence[int]) -> None:
    """Make a convolution map fields of an equivariant network to plain channels, in place.

    A flip of the image then only flips these channels.

    Raises: ValueError: its input channels do not split into copies.
    """
    _convert_conv(layer, into=True, out=False, how=Mirror(axes))


def _convert(network: nn.Module, name: str, layer: Any, regular: tuple[bool, bool], how: Mirror) -> None:
    """regular: whether the layer's input, and its output, are regular fields."""
    copies = 2 ** len(how.axes)
    into, out = regular
    if isinstance(layer, CONVS + TRANSPOSED):
        _convert_conv(layer, into, out, how)
    elif into and getattr(layer, "affine", False):
        _check_copies(layer.weight.shape[0], copies)
        if isinstance(layer, nn.GroupNorm) and (layer.num_channels // layer.num_groups) % copies:
            raise ValueError(
                f"groups of {layer.num_channels // layer.num_groups} channels split fields of {copies} copies"
            )
        if not isinstance(layer, _BatchNorm):
            _tie(layer, copies)
    if into and isinstance(layer, _BatchNorm):
        replace(network, name, MirrorBatchNorm(_narrow(layer, copies), copies))
    elif into and isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
        _check_copies(layer.num_parameters, copies)
        parametrize.register_parametrization(layer, "weight", Repeat(copies), unsafe=True)


def _convert_conv(layer: Any, into: bool, out: bool, how: Mirror) -> None:
    check_free(layer)
    copies = 2 ** len(how.axes)
    channels_in, channels_out, groups = layer.in_channels, layer.out_channels, layer.groups
    for regular, channels in ((into, channels_in), (out, channels_out)):
        if regular:
            _check_copies(channels, copies)
    transposed = isinstance(layer, TRANSPOSED)
    rows, columns = (into, out) if transposed else (out, into)
    if groups == channels_in == channels_out and groups != 1:  # depthwise: each channel filters itself
        columns = False
    elif groups != 1:
        raise ValueError(f"needs groups=1 or a depthwise convolution, got groups={groups}")
    install(layer, MirrorPrior(layer.kernel_size, how.axes, rows, columns), how.init_from_weights)
    if out and layer.bias is not None:
        parametrize.register_parametrization(layer, "bias", Repeat(copies), unsafe=True)


def _tie(norm: nn.Module, copies: int) -> None:
    for key in ("weight", "bias"):
        if getattr(norm, key, None) is not None:
            parametrize.register_parametrization(norm, key, Repeat(copies), unsafe=True)


def _narrow(norm: _BatchNorm, copies: int) -> _BatchNorm:
    """The same batch norm over fields instead of channels."""
    _check_copies(norm.num_features, copies)
    cls = next(c for c in type(norm).__mro__ if c.__module__ == "torch.nn.modules.batchnorm")
    narrow = cls(norm.num_features // copies, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    state = norm.state_dict()
    return _like(
        narrow,
        norm,
        {k: v if v.ndim == 0 else v.unflatten(0, (-1, copies)).mean(1) for k, v in state.items()},
    )


def _like(new: _BatchNorm, old: _BatchNorm, state: dict[str, Tensor]) -> _BatchNorm:
    """Load the state and take device, dtype and flags from the old norm."""
    if state:
        new.to(next(iter(state.values())))
    new.load_state_dict(state)
    if old.affine:
        new.requires_grad_(old.weight.requires_grad)
    return new.train(old.training)


def _check_copies(channels: int, copies: int) -> None:
    if channels % copies:
        raise ValueError(f"channels must be divisible by {copies}, the copies of a field, got {channels}")
