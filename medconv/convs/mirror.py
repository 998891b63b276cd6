"""`conv=mirror`: a whole network that is equivariant to reflections, f(flip x) = flip f(x).

Channels of a regular field come in 2, 4 or 8 copies, one per element of the group of flips along one, two or
three axes; a flip of the image flips each copy and swaps the copies. Copy h of field c is channel c * copies
+ h: the group index is innermost, so that fields can be concatenated. The first layers lift the image to
fields, the last map back to channels, and norms share their parameters among copies. Source: Cohen and
Welling 2016, arXiv:1602.07576.
"""

from collections.abc import Callable, Sequence
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
        kernel: Tensor = original.unflatten(1, self.kernel_size)
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
        kernel: Tensor = taps.unflatten(1, self.kernel_size)
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
        value = value.detach().unflatten(0, (-1, self.copies))
        return value.mean(1)


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
        # copies side by side along the first spatial axis
        y = self.norm(x.unflatten(1, (-1, self.copies)).flatten(2, 3))
        x = y.unflatten(2, (self.copies, -1)).flatten(1, 2)
        return x.contiguous(memory_format=layout)

    def folded(self) -> nn.Module:
        """A plain batch norm over all channels."""
        return _resized(self.norm, self.norm.num_features * self.copies, Repeat(self.copies))


@dataclass(frozen=True)
class Mirror:
    """Makes a whole network equivariant to reflections; pass it to `swap_convs` as `conv`.

    Args:
        axes: spatial axes of the image, counted from 0, along which it may be flipped.
        init_from_weights: start from the present weights, averaged over the group, instead of new ones.
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
    """The axes along which `conv=mirror` made a network equivariant; none for others and folded ones."""
    return next((layer.axes for layer in network.modules() if isinstance(layer, MirrorPrior)), ())


def equivariant_head(layer: nn.Module, axes: Sequence[int]) -> None:
    """Make a convolution map fields to plain channels, which a flip of the image only flips; in place.

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
        of_group = layer.num_channels // layer.num_groups if isinstance(layer, nn.GroupNorm) else 0
        if of_group % copies:
            raise ValueError(f"groups of {of_group} channels split fields of {copies} copies")
        for key in () if isinstance(layer, _BatchNorm) else ("weight", "bias"):
            if getattr(layer, key, None) is not None:
                parametrize.register_parametrization(layer, key, Repeat(copies), unsafe=True)
    if into and isinstance(layer, _BatchNorm):
        _check_copies(layer.num_features, copies)
        narrow = _resized(layer, layer.num_features // copies, Repeat(copies).right_inverse)
        replace(network, name, MirrorBatchNorm(narrow, copies))
    elif into and isinstance(layer, nn.PReLU) and layer.num_parameters > 1:
        _check_copies(layer.num_parameters, copies)
        parametrize.register_parametrization(layer, "weight", Repeat(copies), unsafe=True)


def _convert_conv(layer: Any, into: bool, out: bool, how: Mirror) -> None:
    check_free(layer)
    copies, groups = 2 ** len(how.axes), layer.groups
    for regular, channels in ((into, layer.in_channels), (out, layer.out_channels)):
        if regular:
            _check_copies(channels, copies)
    rows, columns = (into, out) if isinstance(layer, TRANSPOSED) else (out, into)
    if groups != 1:
        columns = False  # depthwise: each channel filters itself
        if not groups == layer.in_channels == layer.out_channels:
            raise ValueError(f"needs groups=1 or a depthwise convolution, got groups={groups}")
    install(layer, MirrorPrior(layer.kernel_size, how.axes, rows, columns), how.init_from_weights)
    if out and layer.bias is not None:
        parametrize.register_parametrization(layer, "bias", Repeat(copies), unsafe=True)


def _resized(norm: _BatchNorm, channels: int, change: Callable[[Tensor], Tensor]) -> _BatchNorm:
    """A plain batch norm like this one with more or fewer channels. Args: change: of each vector in it."""
    cls = next(c for c in type(norm).__mro__ if c.__module__ == "torch.nn.modules.batchnorm")
    new: _BatchNorm = cls(channels, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    state = {key: change(value) if value.ndim else value for key, value in norm.state_dict().items()}
    if state:
        new.to(next(iter(state.values())))
    new.load_state_dict(state)
    if norm.affine:
        new.requires_grad_(norm.weight.requires_grad)
    return new.train(norm.training)


def _check_copies(channels: int, copies: int) -> None:
    if channels % copies:
        raise ValueError(f"channels must be divisible by {copies}, the copies of a field, got {channels}")
