"""Scale loaded kernels before a norm to the size of random ones; the network's outputs stay the same.

A norm divides by the size of its input, so the size of the kernel before it does not change the output. But
a training step turns a kernel by (size of the step) / (size of the kernel), and kernels grow in training: in
six minutes of Muon by 3 to 45 times. Fine-tuning would turn them that much more slowly than random kernels.
Kernels before batch norm stay as they are: there it was better in some trainings and worse in others.
Source: van Laarhoven 2017, arXiv:1706.05350.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from medconv.convs.parametrization import CONVS, has_own_forward

# Each divides by statistics of its input, which it does not keep
_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)


@torch.no_grad()
def kernel_sizes(network: nn.Module) -> dict[str, float]:
    """The Frobenius norm of each kernel that a norm follows, by the name of the convolution."""
    return {name: float(conv.weight.norm()) for name, conv in _convs_before_norms(network)}


@torch.no_grad()
def rescale(network: nn.Module, sizes: Mapping[str, float]) -> dict[str, float]:
    """Scale kernels that a norm follows to about these sizes, in place.

    Factors are powers of two, which lose no digit.

    Args:
        sizes: those of the random kernels, of `kernel_sizes`.
    Returns:
        The factor of each convolution that was scaled, by its name.
    """
    factors = {}
    for name, conv in _convs_before_norms(network):
        size = float(conv.weight.norm())
        if size == 0 or sizes[name] == 0:
            continue
        factor = 2.0 ** round(math.log2(sizes[name] / size))
        if factor != 1 and _can_scale(conv, factor):
            factors[name] = factor
    return factors


def _can_scale(conv: Any, factor: float) -> bool:
    """Scale the weight and bias of a convolution; False: its weight is not linear, and stays."""
    expected = factor * conv.weight
    parameters = list(conv.parameters())  # of a computed weight, those that it is computed from
    for parameter in parameters:
        parameter.mul_(factor)
    if torch.allclose(conv.weight, expected):
        return True
    for parameter in parameters:
        parameter.div_(factor)
    return False


def _convs_before_norms(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and convolutions, where an `nn.Sequential` runs a norm directly after one."""
    names = {module: name for name, module in network.named_modules()}
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    for block in names:
        for conv, norm in pairwise(_layers(block)):
            if not isinstance(conv, CONVS) or has_own_forward(conv) or not isinstance(norm, _NORMS):
                continue
            is_used_once = all(uses[id(parameter)] == 1 for parameter in conv.parameters())
            if is_used_once and getattr(norm, "running_mean", None) is None:
                yield names[conv], conv


def _layers(block: nn.Module) -> list[nn.Module]:
    """The layers that an `nn.Sequential` runs one after another, those of nested ones too."""
    if not isinstance(block, nn.Sequential) or type(block).forward is not nn.Sequential.forward:
        return []
    layers = []
    for layer in block:
        layers += _layers(layer) or [layer]
    return layers
