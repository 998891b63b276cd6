"""`conv=mirror` and `conv=turns`: a whole network that commutes with motions of the image, f(g x) = g f(x).

The motions are a group: flips along some axes, quarter turns in some planes and their products. Channels of
a regular field come in copies, one per element of the group; a motion of the image moves each copy and
permutes the copies. Copy h of field c is channel c * copies + h: the group index is innermost, so that
fields can be concatenated. The first layers lift the image to fields, the last map back to channels, and
norms share their parameters among copies.

Source: Cohen and Welling 2016, arXiv:1602.07576, for p4m in 2D; here also in 3D, and with some axes alone.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from medconv.convs.parametrization import (
    CHANNELS_LAST,
    CONVS,
    TRANSPOSED,
    EquivariantPrior,
    Foldable,
    Prior,
    check_free,
    install,
    replace,
)
from medconv.convs.swap import NetworkConversion
from medconv.features.equivariance.fields import check_equivariance, fields, layers_with_channels
from medconv.features.equivariance.group import Group

# Filters of a layer, with fewer of which networks learned little in short runs: 2D phantoms, 150 steps
# (experiments/convolutions.md)
_FEW = 8
# Of two axes of a plane: the ratio of their voxels above which a quarter turn is no motion in mm
_STRETCHED = 1.05
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Regular:
    """Whether a layer's input and its output are regular fields, not plain channels."""

    input: bool
    output: bool


@dataclass(frozen=True)
class Equivariant(NetworkConversion):
    """Makes a whole network equivariant to flips and quarter turns; pass it to `swap_convs` as `conv`.

    Args:
        axes: spatial axes of the image, counted from 0, along which it may be flipped.
        planes: pairs of spatial axes in which it may be turned by 90 degrees; kernels and strides of both
            axes must be equal.
        init_from_weights: start from the present weights, averaged over the group, instead of new ones.
        spacing_mm: voxel size of the images, where it is known.
    Raises:
        ValueError: neither axes nor planes, a repeated or negative axis; when called, an axis that the
            network does not have, channels that do not split into copies, or a layer that breaks the
            symmetry (named).
    Weights: those of a plain network of equal width, divided by the elements of the group: 2 for one axis, 4
        for turns of one plane, 8 with its flips, 48 for all motions of a cube.
    """

    axes: Sequence[int] = ()
    planes: Sequence[Sequence[int]] = ()
    init_from_weights: bool = False
    spacing_mm: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for axes in (self.axes, *self.planes):
            if len(set(axes)) != len(axes) or min(axes, default=0) < 0:
                raise ValueError(f"axes must be different spatial axes, counted from 0, got {list(axes)}")
        for plane in self.planes:
            if len(plane) != 2:
                raise ValueError(f"planes must be pairs of spatial axes, such as [[0, 1]], got {list(plane)}")
        if not self.axes and not self.planes:
            raise ValueError("axes or planes must name a spatial axis, counted from 0, got neither")

    def __call__(self, network: nn.Module, example: Tensor) -> list[str]:
        """Convert a network in place; if that fails, the network stays unchanged.

        Args:
            example: an input (batch, channels, *spatial).
        Returns:
            The convolutions changed, by name.
        """
        planes = tuple((first, second) for first, second in self.planes)
        group = Group(example.ndim - 2, tuple(self.axes), planes)
        regular = {}
        for name, (reads_fields, writes_fields) in fields(network, example).items():
            regular[name] = Regular(input=reads_fields, output=writes_fields)
        with torch.random.fork_rng([]):  # the network gets the same new weights as without this trial
            trial = deepcopy(network)
            self._convert_all(trial, regular, group)
            check_equivariance(trial, example, group)
        return self._convert_all(network, regular, group)

    def doubts(self, network: nn.Module) -> list[str]:
        return [*self._stretched_planes(), *self._narrow_layers(network)]

    def _stretched_planes(self) -> list[str]:
        """Planes in which a quarter turn is no motion of what the image shows."""
        doubts = []
        for plane in self.planes:
            sizes = [self.spacing_mm[axis] for axis in plane] if self.spacing_mm else [1.0]
            if max(sizes) > _STRETCHED * min(sizes):
                voxels = " x ".join(f"{size:g}" for size in sizes)
                doubts.append(
                    f"voxels of the plane {list(plane)} are {voxels} mm, so that a turn by 90 degrees also "
                    "stretches what they show; data.spacing_mm can make them square"
                )
        return doubts

    @staticmethod
    def _narrow_layers(network: nn.Module) -> list[str]:
        widths = {}
        for name, layer in network.named_modules():
            if not isinstance(layer, CONVS) or not parametrize.is_parametrized(layer, "weight"):
                continue
            prior: Any = layer.parametrizations.weight[0]  # type: ignore[union-attr,index]
            if isinstance(prior, GroupPrior) and prior.rows:
                widths[name] = (layer.out_channels, len(prior.group))
        name = min(widths, key=lambda name: widths[name], default="")
        channels, copies = widths.get(name, (_FEW, 1))
        filters = channels // copies
        if filters >= _FEW:
            return []
        return [
            f"layer {name} has {channels} channels, which are {filters} filters in {copies} copies; with "
            f"fewer than {_FEW}, networks learned little in short runs: a wider network, or fewer axes and "
            "planes, has more"
        ]

    def _convert_all(self, network: nn.Module, regular: dict[str, Regular], group: Group) -> list[str]:
        converted = []
        for name, layer in layers_with_channels(network):
            if name not in regular:
                continue
            try:
                _convert(network, name, layer, regular[name], group, self.init_from_weights)
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}") from error
            layer.train(layer.training)  # new parametrizations are in training mode
            converted.append(name)
        # norms are converted, too, but only convolutions are reported
        layers = {name: network.get_submodule(name) for name in converted}
        return [name for name, layer in layers.items() if isinstance(layer, CONVS + TRANSPOSED)]


def _convert(
    network: nn.Module, name: str, layer: Any, regular: Regular, group: Group, keeps_weights: bool
) -> None:
    """Tie the copies of one layer with parameters per channel."""
    if isinstance(layer, CONVS + TRANSPOSED):
        _convert_conv(layer, regular, group, keeps_weights)
    elif not regular.input:
        return  # at the image: no copies to tie
    elif isinstance(layer, _BatchNorm):
        _check_copies(layer.num_features, len(group))
        replace(network, name, SharedBatchNorm.of(layer, len(group)))
    elif isinstance(layer, nn.PReLU):
        if layer.num_parameters > 1:  # a single slope is shared already
            _check_copies(layer.num_parameters, len(group))
            _tie(layer, "weight", len(group))
    elif getattr(layer, "affine", False):
        _convert_affine(layer, len(group))


def _convert_affine(norm: Any, copies: int) -> None:
    """Tie scale and shift of an instance or group norm."""
    _check_copies(norm.weight.shape[0], copies)
    if isinstance(norm, nn.GroupNorm):
        # a motion swaps the copies of a field, which must not leave their group of the norm
        group_channels = norm.num_channels // norm.num_groups
        if group_channels % copies:
            raise ValueError(f"groups of {group_channels} channels split fields of {copies} copies")
    for key in ("weight", "bias"):
        if getattr(norm, key, None) is not None:
            _tie(norm, key, copies)


def _convert_conv(layer: Any, regular: Regular, group: Group, keeps_weights: bool) -> None:
    check_free(layer)
    _check_turns(layer, group)
    if regular.input:
        _check_copies(layer.in_channels, len(group))
    if regular.output:
        _check_copies(layer.out_channels, len(group))
    # rows of the prior are the weight's output channels, columns its input channels
    rows = regular.output
    columns = regular.input
    if isinstance(layer, TRANSPOSED):  # its weight is (in, out, *kernel_size)
        rows = regular.input
        columns = regular.output
    if layer.groups != 1:
        if not layer.groups == layer.in_channels == layer.out_channels:
            raise ValueError(f"needs groups=1 or a depthwise convolution, got groups={layer.groups}")
        columns = False  # depthwise: each channel filters itself
    install(layer, GroupPrior(layer.kernel_size, group, rows, columns), keeps_weights)
    # the copies of a field differ by motions alone, which leave a bias as it is
    if regular.output and layer.bias is not None:
        _tie(layer, "bias", len(group))


def _check_turns(layer: Any, group: Group) -> None:
    for first, second in group.planes:
        for key in ("kernel_size", "stride", "dilation"):
            values = getattr(layer, key)
            if values[first] != values[second]:
                raise ValueError(
                    f"turns need an equal {key} along axes {first} and {second}, got {list(values)}"
                )


def _tie(layer: nn.Module, key: str, copies: int) -> None:
    """Store one value per field for a parameter with one value per channel."""
    parametrize.register_parametrization(layer, key, Repeat(copies), unsafe=True)


def _check_copies(channels: int, copies: int) -> None:
    if channels % copies:
        raise ValueError(f"channels must be divisible by {copies}, the copies of a field, got {channels}")


class GroupPrior(EquivariantPrior):
    """The kernels of one layer of an equivariant network.

    Rows: first axis of the weight (outputs, or inputs of a transposed convolution); columns: the second. h
    and g are elements of the group, and h k is a kernel moved by h.
        both regular:  W[(o,h), (i,g)] = h P[o, (i, h^-1 g)]     one of `copies` parameters
        rows regular:  W[(o,h), i] = h P[o, i]                   (lifting; depthwise)
        columns regular: W[o, (i,g)] = g P[o, i]                 (mapping back)
        neither:       W = mean over h of h P

    Shape:
        original (rows' fields, taps, columns' fields or channels) -> weight (rows, columns, *kernel_size).
    Args:
        group: of motions of the image.
        rows: whether rows are regular fields.
        columns: whether columns are regular fields.
    """

    def __init__(self, kernel_size: Sequence[int], group: Group, rows: bool, columns: bool) -> None:
        super().__init__(kernel_size)
        self.group = group
        self.axes = group.flips
        self.rows = rows
        self.columns = columns

    def make_head(self, layer: nn.Module) -> None:
        _convert_conv(layer, Regular(input=True, output=False), self.group, keeps_weights=False)

    def taps(self, original: Tensor) -> Tensor:
        group = self.group
        kernel: Tensor = original.unflatten(1, self.kernel_size)
        if self.rows and self.columns:
            kernel = kernel.unflatten(-1, (-1, len(group)))
            copies = []
            for element, inverse in zip(group.elements, group.inverses, strict=True):
                copies.append(element(kernel, 1)[..., group.products[inverse]])
            kernel = torch.stack(copies, 1)
        elif self.rows:
            kernel = group.orbit(kernel, 1, 1)
        elif self.columns:
            kernel = group.orbit(kernel, 1, -1)
        else:
            kernel = group.orbit(kernel, 1, 0).mean(0)
        # The group indices follow their fields, so a reshape makes channels of them.
        rows = original.shape[0] * (len(group) if self.rows else 1)
        return kernel.reshape(rows, prod(self.kernel_size), -1)

    def nearest(self, taps: Tensor) -> Tensor:
        """The mean over the group, after each copy is moved back to match the first."""
        group = self.group
        kernel: Tensor = taps.unflatten(1, self.kernel_size)
        if self.columns:
            kernel = kernel.unflatten(-1, (-1, len(group)))
        copies = [kernel] * len(group)
        if self.rows:
            copies = list(kernel.unflatten(0, (-1, len(group))).unbind(1))
        if self.rows and self.columns:
            copies = [copy[..., group.products[number]] for number, copy in enumerate(copies)]
        elif self.columns:
            copies = list(kernel.unbind(-1))
        moved_back = [
            group.elements[inverse](copy, 1) for inverse, copy in zip(group.inverses, copies, strict=True)
        ]
        mean = torch.stack(moved_back).mean(0)
        return mean.reshape(mean.shape[0], prod(self.kernel_size), -1)


class Repeat(Prior):
    """One value per field, repeated for its copies: biases, and the scale and shift of norms.

    Shape:
        original (fields,) -> (fields * copies,).
    """

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, original: Tensor) -> Tensor:
        return original.repeat_interleave(self.copies)

    def right_inverse(self, value: Tensor) -> Tensor:
        value = value.detach().unflatten(0, (-1, self.copies))
        return value.mean(1)


class SharedBatchNorm(Foldable, fold_is_tested=True):
    """Batch norm in which the copies of a field share parameters and statistics.

    Shape:
        (batch, fields * copies, *spatial) -> the same.
    Args:
        norm: a batch norm of `fields` channels.
        copies: of each field, one per element of the group.
    """

    def __init__(self, norm: _BatchNorm, copies: int) -> None:
        super().__init__()
        self.norm = norm
        self.copies = copies
        self.train(norm.training)

    @classmethod
    def of(cls, norm: _BatchNorm, copies: int) -> "SharedBatchNorm":
        """From a batch norm of all channels; each field gets the mean over its copies."""
        one_per_field = Repeat(copies).right_inverse
        narrow = _resized(norm, norm.num_features // copies, one_per_field)
        return cls(narrow, copies)

    def forward(self, x: Tensor) -> Tensor:
        layout = torch.contiguous_format
        if not x.is_contiguous():
            layout = CHANNELS_LAST.get(x.ndim, layout)
        # copies side by side along the first spatial axis, so that they count as voxels of one channel
        by_field = x.unflatten(1, (-1, self.copies)).flatten(2, 3)
        normed: Tensor = self.norm(by_field)
        by_copy = normed.unflatten(2, (self.copies, -1))  # (batch, fields, copies, D, ...)
        by_channel: Tensor = by_copy.flatten(1, 2)
        return by_channel.contiguous(memory_format=layout)

    def folded(self) -> nn.Module:
        """A plain batch norm over all channels."""
        num_channels = self.norm.num_features * self.copies
        return _resized(self.norm, num_channels, Repeat(self.copies))


def _resized(norm: _BatchNorm, channels: int, change: Callable[[Tensor], Tensor]) -> _BatchNorm:
    """A plain batch norm like this one with more or fewer channels.

    Args:
        change: maps each vector of its state to one of `channels` values.
    """
    # A subclass may take other arguments and keep other state.
    plain_class = next((cls for cls in _BATCH_NORMS if isinstance(norm, cls)), _BatchNorm)
    new: _BatchNorm = plain_class(channels, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    state = {}
    for key, value in norm.state_dict().items():
        state[key] = change(value) if value.ndim else value  # the count of batches is one number
    if state:
        new.to(next(iter(state.values())))
    new.load_state_dict(state)
    if norm.affine:
        new.requires_grad_(norm.weight.requires_grad)
    return new.train(norm.training)
