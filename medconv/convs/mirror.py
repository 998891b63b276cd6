"""`conv=mirror`: a whole network that is equivariant to reflections, f(flip x) = flip f(x).

Channels of a regular field come in 2, 4 or 8 copies, one per element of the group of flips along one, two or
three axes; a flip of the image flips each copy and swaps the copies. Copy h of field c is channel c * copies
+ h: the group index is innermost, so that fields can be concatenated. The first layers lift the image to
fields, the last map back to channels, and norms share their parameters among copies.

Source: Cohen and Welling 2016, arXiv:1602.07576, for rotations and reflections of p4m; here reflections
alone, in 2D and 3D, along axes of choice.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from medconv.convs.equivariance import check_equivariance, fields, layers_with_channels
from medconv.convs.mirror_layers import MirrorBatchNorm, MirrorPrior, Repeat
from medconv.convs.parametrization import CONVS, TRANSPOSED, check_free, install, replace


@dataclass(frozen=True)
class Regular:
    """Whether a layer's input and its output are regular fields, not plain channels."""

    input: bool
    output: bool


@dataclass(frozen=True)
class Mirror:
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
        """Of each field: one per element of the group of flips."""
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


def mirror_axes(network: nn.Module) -> tuple[int, ...]:
    """The axes along which `conv=mirror` made a network equivariant; none for others and folded ones."""
    for layer in network.modules():
        if isinstance(layer, MirrorPrior):
            return layer.axes
    return ()


def equivariant_head(layer: nn.Module, axes: Sequence[int]) -> None:
    """Make a convolution map fields to plain channels, which a flip of the image only flips; in place.

    Args:
        layer: its inputs are fields of a network that `Mirror(axes)` converted.
        axes: spatial axes, counted from 0.
    Raises:
        ValueError: its input channels do not split into copies.
    """
    _convert_conv(layer, Regular(input=True, output=False), Mirror(axes))


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
