"""`conv=transform`: a learned 1x1 channel transform, then a fixed filter bank; folded if cheaper."""

from collections.abc import Sequence
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

    Shape: original (transform_channels, in) -> weight (out, in, *kernel_size).
    Args: bank: (groups, out / groups, transform_channels / groups, *kernel_size), fixed.
    Source: the convolution that this project started from.
    """

    bank: Tensor

    def __init__(self, bank: Tensor) -> None:
        groups, per_group, width, *kernel_size = bank.shape
        super().__init__(kernel_size)
        self.groups = groups
        rows = bank.reshape(groups * per_group, width, prod(kernel_size))
        self.register_buffer("bank", rows.float().contiguous())

    @property
    def _blocks(self) -> Tensor:  # (groups, out / groups * kernel, width)
        out, width, taps = self.bank.shape
        blocks = self.bank.view(self.groups, out // self.groups, width, taps)
        return blocks.transpose(2, 3).reshape(self.groups, -1, width)

    def taps(self, original: Tensor) -> Tensor:
        transform = original.view(self.groups, -1, original.shape[1])
        weight = torch.bmm(self._blocks.to(original.dtype), transform)
        return weight.view(self.bank.shape[0], self.bank.shape[2], -1)

    def nearest(self, taps: Tensor) -> Tensor:
        dense = taps.reshape(self.groups, -1, taps.shape[2])
        inverse: Tensor = torch.linalg.pinv(self._blocks.double())
        return (inverse @ dense).reshape(-1, taps.shape[2])

    def dense_bank(self) -> Tensor:
        """As the weight of a grouped convolution: (out, width, *kernel_size), in the layer's layout."""
        bank: Tensor = self.bank.unflatten(2, self.kernel_size)
        return bank.contiguous(memory_format=self.memory_format)


class TwoLaunches(nn.Module):
    """Mixin for a convolution with `transform`: each call takes the cheaper of two equivalent ways.

    Folded: one dense convolution, whose kernel is computed first. In two launches: the transform is a 1x1
    convolution and the bank a grouped one. `medconv.convs.cost_model` predicts from sizes which is cheaper.
    """

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        prior = layer.parametrizations.weight[0]
        only_ours = len(layer.parametrizations.weight) == 1  # the user may add others after ours
        if only_ours and prefers_two_launches(layer, prior, input):
            return _two_launches(layer, prior, input)
        output: Tensor = super().forward(input)
        return output


def prefers_two_launches(conv: Conv, prior: TransformPrior, x: Tensor) -> bool:
    """Whether a 1x1 convolution and the bank cost less than one folded convolution, by the cost model."""
    machine, voxels = cost_model.machine_of(x.device), x.shape[0] * prod(x.shape[2:])
    folded, two = ways(conv, prior, voxels, voxels // prod(conv.stride), machine, torch.is_grad_enabled())
    return machine.seconds(two) < machine.seconds(folded)


def ways(
    conv: Conv,
    prior: TransformPrior,
    in_voxels: int,
    out_voxels: int,
    machine: cost_model.Machine,
    training: bool,
) -> tuple[list[cost_model.Launch], list[cost_model.Launch]]:
    """The launches of a forward pass or a training step: (folded, in two). The bank has no gradient."""
    cost, width = partial(cost_model.convolution, machine=machine), prior.bank.shape[1] * prior.groups
    into, out, kernel = conv.in_channels, conv.out_channels, conv.kernel_size
    learned, fixed = (3, 2) if training else (1, 1)
    elements = out * into * prior.bank.shape[2]
    fold = cost_model.weight_preparation(elements, elements * prior.bank.shape[1], fixed)
    dense = cost(into, out, kernel, in_voxels, out_voxels, passes=learned)
    point = cost(into, width, [1] * len(kernel), in_voxels, in_voxels, passes=learned)
    bank = cost(width, out, kernel, in_voxels, out_voxels, prior.groups, passes=fixed)
    return [fold, dense], [point, bank]


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
    Raises: ValueError: groups, an even kernel, no transform channels, a bank of the wrong shape.
    Weights: transform_channels * in, against out * in * k^N; weight decay acts on the transform.
    """
    check_plain_groups(conv, "transform")
    check_free(conv)
    width = conv.out_channels if transform_channels is None else transform_channels
    if width < 1:
        raise ValueError(f"transform_channels must be at least 1, got {width}")
    if not isinstance(bank, Tensor):
        sigma = None if sigma_mm is None else sigma_mm * scale
        filters = filter_bank(bank, conv.kernel_size, spacing_mm, sigma)
        blocks = _blocks(conv.out_channels, width, filters)
    elif tuple(bank.shape) != (need := (conv.out_channels, width, *conv.kernel_size)):
        raise ValueError(
            f"bank must have shape (out, transform_channels, *kernel_size) = {need}, got {tuple(bank.shape)}"
        )
    else:
        blocks = bank.unsqueeze(0)
    mixin = None if has_own_forward(conv) else TwoLaunches
    return install(conv, TransformPrior(blocks), init_from_weights, mixin)


def _blocks(out: int, width: int, filters: Tensor) -> Tensor:
    """In each block, output o sees transform channel t through filter (o + t) mod F.

    There are as few blocks as possible in which no two outputs of a block have the same filters.
    Shape: (groups, out / groups, width / groups, *kernel_size).
    """
    most = gcd(out, width)
    groups = next((g for g in range(1, most) if most % g == 0 and out // g <= len(filters)), most)
    index = torch.arange(out // groups)[:, None] + torch.arange(width // groups)[None, :]
    return filters[index % len(filters)].expand(groups, *index.shape, *filters.shape[1:])


def _two_launches(conv: Any, prior: TransformPrior, x: Tensor) -> Tensor:
    transform = conv.parametrizations.weight.original
    ones = [1] * len(conv.kernel_size)
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(ones) + 2]
    mixed, padding = convolve(x, transform.reshape(*transform.shape, *ones)), conv.padding
    if conv.padding_mode != "zeros":
        mixed, padding = F.pad(mixed, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
    return convolve(mixed, prior.dense_bank(), conv.bias, conv.stride, padding, conv.dilation, prior.groups)
