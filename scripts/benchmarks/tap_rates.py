"""A learning rate for each tap of a kernel: an arm of the study of convolutions, not an option of medconv."""

import torch
from torch import nn

from medconv.convs.linear import LinearPrior
from medconv.convs.parametrization import Conv, install

_SPREAD = 1.0  # standard deviation of the factors over the taps, in taps


def tap_rates(conv: Conv) -> nn.Module:
    """The same weights, of which taps learn the more slowly, the farther they are from the centre.

    A weight is a factor times a parameter, so its steps are that many times as long; the mean square of the
    factors is 1.
    """
    axes = [torch.arange(edge) - (edge - 1) / 2 for edge in conv.kernel_size]
    squares = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(0).flatten()
    factors = torch.exp(-squares.double() / (2 * _SPREAD**2))
    factors /= factors.square().mean().sqrt()
    return install(conv, LinearPrior(conv.kernel_size, factors.diag()[None]), True)
