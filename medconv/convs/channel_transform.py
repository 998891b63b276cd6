"""`conv=transform`: a learned 1x1 channel transform, then a fixed filter bank; folded if cheaper.

y = S * (T x), with T learned and S a fixed bank of anatomical filters. Related: structured receptive fields,
Jacobsen et al. 2016, arXiv:1605.02971, where the bank comes first and the learned combination second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.convs import cost_model
from medconv.convs.filter_banks import filter_bank
from medconv.convs.parametrization import (
    Conv,
    ForwardMixin,
    WeightPrior,
    check_free,
    check_plain_groups,
    has_own_forward,
    install,
)


class TransformPrior(WeightPrior):
    """Folded weight of a learned channel transform T followed by a fixed filter bank S: y = S * (T x).

    W[o, i, k] = sum over t of S[o, t, k] T[t, i]. Folding is exact, padding included, because T has no bias.
    The bank is block-diagonal: output channels come in `groups` blocks, and each block filters transform
    channels of its own, so the fold costs out * transform * in * kernel / groups operations.

    Shape:
        original (transform_channels, in) -> weight (out, in, *kernel_size).
    Args:
        bank: (groups, out / groups, transform_channels / groups, *kernel_size), fixed.
    Source: the convolution that this project started from.
    """

    bank: Tensor  # (out, transform channels per group, taps)

    def __init__(self, bank: Tensor) -> None:
        groups, out_per_group, width, *kernel_size = bank.shape
        super().__init__(kernel_size)
        self.groups = groups
        rows = bank.reshape(groups * out_per_group, width, prod(kernel_size))
        self.register_buffer("bank", rows.float().contiguous())

    @property
    def _blocks(self) -> Tensor:
        """The bank as one matrix per group. Shape: (groups, out / groups * taps, width)."""
        out_channels, width, taps = self.bank.shape
        blocks = self.bank.view(self.groups, out_channels // self.groups, width, taps)
        return blocks.transpose(2, 3).reshape(self.groups, -1, width)

    def taps(self, original: Tensor) -> Tensor:
        in_channels = original.shape[1]
        transform = original.view(self.groups, -1, in_channels)
        # (groups, out / groups * taps, width) @ (groups, width, in)
        weight = torch.bmm(self._blocks.to(original.dtype), transform)
        out_channels, _, taps = self.bank.shape
        return weight.view(out_channels, taps, in_channels)

    def nearest(self, taps: Tensor) -> Tensor:
        in_channels = taps.shape[2]
        dense = taps.reshape(self.groups, -1, in_channels)
        # least squares in double precision: banks of nearly equal filters are ill-conditioned
        inverse: Tensor = torch.linalg.pinv(self._blocks.double())
        return (inverse @ dense).reshape(-1, in_channels)

    def dense_bank(self) -> Tensor:
        """As the weight of a grouped convolution: (out, width, *kernel_size), in the layer's layout."""
        bank: Tensor = self.bank.unflatten(2, self.kernel_size)
        # Not `contiguous`, which leaves the strides of one channel as they are
        return bank.to(memory_format=self.memory_format)


class TwoLaunches(ForwardMixin):
    """Mixin for a convolution with `transform`: each call takes the cheaper of two equivalent ways.

    Folded: one dense convolution, whose kernel is computed first. In two launches: the transform is a 1x1
    convolution and the bank a grouped one. `medconv.convs.cost_model` predicts from sizes which is cheaper.
    """

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        priors = layer.parametrizations.weight
        prior = priors[0]
        # The user may have added others after ours, of which the two launches would know nothing.
        if len(priors) == 1 and prefers_two_launches(layer, prior, input):
            return in_two_launches(layer, input)
        output: Tensor = super().forward(input)
        return output


@dataclass(frozen=True)
class Ways:
    """The launches of the two ways to compute the same convolution."""

    folded: list[cost_model.Launch]
    two_launches: list[cost_model.Launch]


def prefers_two_launches(conv: Conv, prior: TransformPrior, x: Tensor) -> bool:
    """Whether a 1x1 convolution and the bank cost less than one folded convolution, by the cost model."""
    machine = cost_model.machine_of(x.device, cost_model.computed_in(x))
    in_voxels = x.shape[0] * prod(x.shape[2:])
    ways = ways_of(
        conv,
        prior,
        in_voxels=in_voxels,
        out_voxels=in_voxels // prod(conv.stride),
        machine=machine,
        training=torch.is_grad_enabled(),
    )
    return machine.seconds(ways.two_launches) < machine.seconds(ways.folded)


def ways_of(
    conv: Conv,
    prior: TransformPrior,
    *,
    in_voxels: int,
    out_voxels: int,
    machine: cost_model.Machine,
    training: bool,
) -> Ways:
    """The launches of a forward pass or of a training step.

    Args:
        in_voxels: of the input, counted over the whole batch.
        out_voxels: of the output, counted over the whole batch.
    """
    # forward, gradient of the input, gradient of the weight; the bank is fixed and has no gradient
    passes_learned = 3 if training else 1
    passes_fixed = 2 if training else 1
    cost = partial(cost_model.convolution, machine=machine)
    width_per_group = prior.bank.shape[1]
    transform_channels = width_per_group * prior.groups
    # folded: every dense weight is a sum over the transform channels of its group
    weights = conv.out_channels * conv.in_channels * prod(conv.kernel_size)
    fold = cost_model.weight_preparation(weights, weights * width_per_group, machine, passes_fixed)
    dense = cost(
        conv.in_channels, conv.out_channels, conv.kernel_size, in_voxels, out_voxels, passes=passes_learned
    )
    # in two launches: the image between them is written and read again
    pointwise = cost(
        conv.in_channels,
        transform_channels,
        [1] * len(conv.kernel_size),
        in_voxels,
        in_voxels,
        passes=passes_learned,
    )
    bank = cost(
        transform_channels,
        conv.out_channels,
        conv.kernel_size,
        in_voxels,
        out_voxels,
        groups=prior.groups,
        passes=passes_fixed,
    )
    return Ways(folded=[fold, dense], two_launches=[pointwise, bank])


def transform(
    conv: Conv,
    *,
    transform_channels: int | None = None,
    bank: str | Sequence[str] | Tensor = "jet",
    sigma_mm: float | None = None,
    spacing_mm: Sequence[float] | None = None,
    scale: float = 1.0,
    init_from_weights: bool = False,
) -> nn.Module:
    """A learned 1x1 channel transform, then a fixed anatomical filter bank.

    Args:
        conv, sigma_mm, spacing_mm, scale, init_from_weights: as `basis`; `groups` must be 1.
        transform_channels: how many channels the transform has; None is as many as `conv` has outputs.
        bank: as `basis`; filters of your own are (out, transform_channels, *kernel_size).
    Raises:
        ValueError: groups, an even kernel, no transform channels, a bank of the wrong shape.
    Weights: transform_channels * in, against out * in * k^N; weight decay acts on the transform.
    """
    check_plain_groups(conv, "transform")
    check_free(conv)
    width = conv.out_channels if transform_channels is None else transform_channels
    if width < 1:
        raise ValueError(f"transform_channels must be at least 1, got {width}")
    if isinstance(bank, Tensor):
        expected = (conv.out_channels, width, *conv.kernel_size)
        if tuple(bank.shape) != expected:
            raise ValueError(
                f"bank must have shape (out, transform_channels, *kernel_size) = {expected}, "
                f"got {tuple(bank.shape)}"
            )
        blocks = bank.unsqueeze(0)  # one group: every output has filters of its own
    else:
        layer_sigma_mm = None if sigma_mm is None else sigma_mm * scale
        filters = filter_bank(bank, conv.kernel_size, spacing_mm, layer_sigma_mm)
        blocks = _blocks(conv.out_channels, width, filters)
    # A forward of the layer's own does something else with the weight than one convolution.
    mixin = None if has_own_forward(conv) else TwoLaunches
    return install(conv, TransformPrior(blocks), init_from_weights, mixin)


def _blocks(out_channels: int, width: int, filters: Tensor) -> Tensor:
    """In each block, output o sees transform channel t through filter (o + t) mod F.

    There are as few blocks as possible in which no two outputs of a block have the same filters.

    Shape:
        filters (F, *kernel_size) -> (groups, out / groups, width / groups, *kernel_size).
    """
    # each group has out / groups outputs, and the filters repeat after len(filters) of them
    max_groups = gcd(out_channels, width)
    groups = max_groups
    for candidate in range(1, max_groups):
        if max_groups % candidate == 0 and out_channels // candidate <= len(filters):
            groups = candidate
            break
    outputs = torch.arange(out_channels // groups)
    channels = torch.arange(width // groups)
    index = (outputs[:, None] + channels[None, :]) % len(filters)
    kernel_size = filters.shape[1:]
    return filters[index].expand(groups, *index.shape, *kernel_size)


def in_two_launches(conv: Any, x: Tensor) -> Tensor:
    """What a convolution with `transform` computes, as a 1x1 convolution and one by the bank.

    Shape:
        x (batch, in, *spatial) -> (batch, out, *spatial').
    """
    prior = conv.parametrizations.weight[0]
    transform = conv.parametrizations.weight.original
    spatial_dims = len(conv.kernel_size)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[spatial_dims - 1]
    # The transform has no bias: zeros that pad its input would give zeros, so padding the bank's is the same.
    pointwise_weight = transform.reshape(*transform.shape, *[1] * spatial_dims)
    # 1x1 weights are contiguous in both formats; their strides decide that of the output on a GPU
    pointwise_weight = pointwise_weight.to(memory_format=prior.memory_format)
    mixed = convolve(x, pointwise_weight)
    padding = conv.padding
    if conv.padding_mode != "zeros":  # as torch's own forward: padded beforehand, since F.conv pads by zeros
        mixed = F.pad(mixed, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
        padding = 0
    output = convolve(mixed, prior.dense_bank(), None, conv.stride, padding, conv.dilation, prior.groups)
    if conv.bias is None:
        return output
    # Inside the convolution, oneDNN computes the gradient of a bias with that of the weight, which is fixed.
    bias: Tensor = conv.bias.to(output.dtype).view(-1, *[1] * spatial_dims)
    return output.add_(bias)
