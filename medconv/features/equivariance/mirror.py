"""`conv=mirror`: a whole network that is equivariant to reflections, f(flip x) = flip f(x).

Channels of a regular field come in 2, 4 or 8 copies, one per element of the group of flips along one, two or
three axes; a flip of the image flips each copy and swaps the copies. Copy h of field c is channel c * copies
+ h: the group index is innermost, so that fields can be concatenated. The first layers lift the image to
fields, the last map back to channels, and norms share their parameters among copies.

Source: Cohen and Welling 2016, arXiv:1602.07576, for rotations and reflections of p4m; here reflections
alone, in 2D and 3D, along axes of choice.
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
from medconv.features.equivariance.flips import check_equivariance, fields, layers_with_channels

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Regular:
    """Whether a layer's input and its output are regular fields, not plain channels."""

    input: bool
    output: bool


@dataclass(frozen=True)
class Mirror(NetworkConversion):
    """Makes a whole network equivariant to reflections; pass it to `swap_convs` as `conv`.

    Args:
        axes: spatial axes of the image, counted from 0, along which it may be flipped.
        init_from_weights: start from the present weights, averaged over the group, instead of new ones.
    Raises:
        ValueError: no axis, a repeated or negative one; when called, an axis that the network does not
            have, channels that do not split into copies, or a layer that breaks the symmetry (named).
    Weights: a half, a quarter or an eighth of a plain network's, at equal width.
    """

    axes: Sequence[int] = (0,)
    init_from_weights: bool = False

    def __post_init__(self) -> None:
        is_repeated = len(set(self.axes)) != len(self.axes)
        if not self.axes or is_repeated or min(self.axes) < 0:
            raise ValueError(f"axes must be different spatial axes, counted from 0, got {list(self.axes)}")

    @property
    def copies(self) -> int:
        """How many copies each field has: one per element of the group of flips."""
        copies: int = 2 ** len(self.axes)
        return copies

    def __call__(self, network: nn.Module, example: Tensor) -> list[str]:
        """Convert a network in place; if that fails, the network stays unchanged.

        Args:
            example: an input (batch, channels, *spatial).
        Returns:
            The convolutions changed, by name.
        """
        if max(self.axes) >= example.ndim - 2:
            raise ValueError(
                f"axes must lie below {example.ndim - 2}, the image's spatial axes, got {list(self.axes)}"
            )
        regular = {}
        for name, (reads_fields, writes_fields) in fields(network, example).items():
            regular[name] = Regular(input=reads_fields, output=writes_fields)
        with torch.random.fork_rng():  # the network gets the same new weights as without this trial
            trial = deepcopy(network)
            self._convert_all(trial, regular)
            check_equivariance(trial, example, self.axes)
        return self._convert_all(network, regular)

    def _convert_all(self, network: nn.Module, regular: dict[str, Regular]) -> list[str]:
        converted = []
        for name, layer in layers_with_channels(network):
            if name not in regular:
                continue
            try:
                _convert(network, name, layer, regular[name], self)
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}") from error
            layer.train(layer.training)  # new parametrizations are in training mode
            converted.append(name)
        # norms are converted, too, but only convolutions are reported
        layers = {name: network.get_submodule(name) for name in converted}
        return [name for name, layer in layers.items() if isinstance(layer, CONVS + TRANSPOSED)]


def _convert(network: nn.Module, name: str, layer: Any, regular: Regular, mirror: Mirror) -> None:
    """Tie the copies of one layer with parameters per channel."""
    if isinstance(layer, CONVS + TRANSPOSED):
        _convert_conv(layer, regular, mirror)
    elif not regular.input:
        return  # at the image: no copies to tie
    elif isinstance(layer, _BatchNorm):
        _check_copies(layer.num_features, mirror.copies)
        replace(network, name, MirrorBatchNorm.of(layer, mirror.copies))
    elif isinstance(layer, nn.PReLU):
        if layer.num_parameters > 1:  # a single slope is shared already
            _check_copies(layer.num_parameters, mirror.copies)
            _tie(layer, "weight", mirror.copies)
    elif getattr(layer, "affine", False):
        _convert_affine(layer, mirror.copies)


def _convert_affine(norm: Any, copies: int) -> None:
    """Tie scale and shift of an instance or group norm."""
    _check_copies(norm.weight.shape[0], copies)
    if isinstance(norm, nn.GroupNorm):
        # a flip swaps the copies of a field, which must not leave their group
        group_channels = norm.num_channels // norm.num_groups
        if group_channels % copies:
            raise ValueError(f"groups of {group_channels} channels split fields of {copies} copies")
    for key in ("weight", "bias"):
        if getattr(norm, key, None) is not None:
            _tie(norm, key, copies)


def _convert_conv(layer: Any, regular: Regular, mirror: Mirror) -> None:
    check_free(layer)
    if regular.input:
        _check_copies(layer.in_channels, mirror.copies)
    if regular.output:
        _check_copies(layer.out_channels, mirror.copies)
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
    prior = MirrorPrior(layer.kernel_size, mirror.axes, rows, columns)
    install(layer, prior, mirror.init_from_weights)
    # the copies of a field differ by flips alone, which leave a bias as it is
    if regular.output and layer.bias is not None:
        _tie(layer, "bias", mirror.copies)


def _tie(layer: nn.Module, key: str, copies: int) -> None:
    """Store one value per field for a parameter with one value per channel."""
    parametrize.register_parametrization(layer, key, Repeat(copies), unsafe=True)


def _check_copies(channels: int, copies: int) -> None:
    if channels % copies:
        raise ValueError(f"channels must be divisible by {copies}, the copies of a field, got {channels}")


class MirrorPrior(EquivariantPrior):
    """The kernels of one layer of an equivariant network.

    Rows: first axis of the weight (outputs, or inputs of a transposed convolution); columns: the second.
        both regular:  W[(o,h), (i,g), k] = P[o, (i, gh), flip_h k]     1/copies of the parameters
        rows regular:  W[(o,h), i, k] = P[o, i, flip_h k]               (lifting; depthwise)
        columns regular: W[o, (i,g), k] = P[o, i, flip_g k]             (mapping back)
        neither:       W = mean over h of flip_h P

    Shape:
        original (rows' fields, taps, columns' fields or channels) -> weight (rows, columns, *kernel_size).
    Args:
        axes: spatial axes that are flipped.
        rows: whether rows are regular fields.
        columns: whether columns are regular fields.
    """

    def __init__(self, kernel_size: Sequence[int], axes: Sequence[int], rows: bool, columns: bool) -> None:
        super().__init__(kernel_size)
        self.axes = tuple(axes)
        self.rows = rows
        self.columns = columns

    def make_head(self, layer: nn.Module) -> None:
        _convert_conv(layer, Regular(input=True, output=False), Mirror(self.axes))

    def _spatial_axis(self, step: int) -> int:
        """The axis of a kernel that is flipped, if `step` group indices already follow the rows' fields."""
        return 1 + self.axes[step] + (step if self.rows else 0)

    def _column_group_axis(self, step: int) -> int:
        """The axis of a step's column index, if both are regular.

        Axes: fields, `step` row indices, spatial axes, column fields, one column index per step.
        """
        return 1 + step + len(self.kernel_size) + 1 + step

    def taps(self, original: Tensor) -> Tensor:
        steps = len(self.axes)
        kernel: Tensor = original.unflatten(1, self.kernel_size)
        if self.rows and self.columns:
            kernel = kernel.unflatten(-1, (-1, *[2] * steps))
        for step in range(steps):
            # The row index h goes after the fields and the earlier axes' h, the column index g to the end.
            spatial_axis = self._spatial_axis(step)
            if self.rows and self.columns:
                flipped = kernel.flip(spatial_axis, self._column_group_axis(step))
                kernel = torch.stack([kernel, flipped], 1 + step)
            elif self.rows:
                kernel = torch.stack([kernel, kernel.flip(spatial_axis)], 1 + step)
            elif self.columns:
                kernel = torch.stack([kernel, kernel.flip(spatial_axis)], -1)
            else:
                kernel = (kernel + kernel.flip(spatial_axis)) / 2
        # The group indices follow their fields, so a reshape makes channels of them.
        row_copies = 2**steps if self.rows else 1
        rows = original.shape[0] * row_copies
        return kernel.reshape(rows, prod(self.kernel_size), -1)

    def nearest(self, taps: Tensor) -> Tensor:
        """The mean over the group, after each copy is flipped back to match the first."""
        steps = len(self.axes)
        kernel: Tensor = taps.unflatten(1, self.kernel_size)
        if self.columns:
            kernel = kernel.unflatten(-1, (-1, *[2] * steps))
        if self.rows:
            kernel = kernel.unflatten(0, (-1, *[2] * steps))
        for step in reversed(range(steps)):  # undoes `taps`
            spatial_axis = self._spatial_axis(step)
            if self.rows:
                first, second = kernel.unbind(1 + step)
                if self.columns:
                    second = second.flip(spatial_axis, self._column_group_axis(step))
                else:
                    second = second.flip(spatial_axis)
                kernel = (first + second) / 2
            elif self.columns:
                first, second = kernel.unbind(-1)
                kernel = (first + second.flip(spatial_axis)) / 2
            else:
                kernel = (kernel + kernel.flip(spatial_axis)) / 2
        return kernel.reshape(kernel.shape[0], prod(self.kernel_size), -1)


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


class MirrorBatchNorm(Foldable, fold_is_tested=True):
    """Batch norm in which the copies of a field share parameters and statistics.

    Shape:
        (batch, fields * copies, *spatial) -> the same.
    Args:
        norm: a batch norm of `fields` channels.
        copies: of each field, one per element of the group of flips.
    """

    def __init__(self, norm: _BatchNorm, copies: int) -> None:
        super().__init__()
        self.norm = norm
        self.copies = copies
        self.train(norm.training)

    @classmethod
    def of(cls, norm: _BatchNorm, copies: int) -> "MirrorBatchNorm":
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
