"""`conv.share`: a part of each layer's kernels by a prior, the others plain."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.convs.parametrization import (
    Conv,
    Prior,
    UnsuitableLayerError,
    WeightPrior,
    check_plain_groups,
    note_error,
)


class SharedPrior(Prior):
    """The kernels of the first output channels by a prior, those of the others as they are.

    Shape: original0, as the prior has it; original1 (out - outputs, in, *kernel_size)
        -> weight (out, in, *kernel_size).
    """

    def __init__(self, prior: WeightPrior, outputs: int) -> None:
        super().__init__()
        self.prior = prior
        self.outputs = outputs

    def forward(self, original: Tensor, plain: Tensor) -> Tensor:
        weight = torch.cat([self.prior(original), plain])
        return weight.contiguous(memory_format=self.prior.memory_format)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.prior.right_inverse(weight[: self.outputs]), weight[self.outputs :].detach().clone()


def shared(layer: Conv, conv: Callable[..., Any], share: float, **settings: Any) -> nn.Module:
    """Put a prior on a share of a layer's output channels, in place.

    Args:
        layer: a convolution with at least two output channels.
        conv: one of this package's weight-space priors, as `swap_convs` takes it. settings: for it.
        share: of the output channels, more than 0 and less than 1; at least one has the prior, and one not.
    Raises: UnsuitableLayerError: grouped, or one output channel. ValueError: no weight-space prior that keeps
        the kernel's size; as `conv`.
    """
    check_plain_groups(layer, "share")
    if layer.out_channels < 2:
        raise UnsuitableLayerError("conv.share needs two output channels", "one output channel")
    outputs = min(max(1, round(share * layer.out_channels)), layer.out_channels - 1)
    part: Any = deepcopy(layer)
    part.out_channels = outputs
    part.weight = nn.Parameter(layer.weight.detach()[:outputs].clone(), layer.weight.requires_grad)
    part.bias = None
    made: Any = conv(part, **settings)
    priors = list(made.parametrizations.weight) if parametrize.is_parametrized(made, "weight") else []
    size = getattr(made, "kernel_size", None)
    kept = made is part and type(layer) in type(part).__mro__[:2] and size == layer.kernel_size
    if kept and not priors:  # new weights alone
        with torch.no_grad():
            layer.weight[:outputs].copy_(made.weight)
        return layer
    if not kept or len(priors) != 1 or not isinstance(priors[0], WeightPrior):
        raise ValueError(
            "conv.share needs kernels of the layer's own size: conv=acs, ball, basis, masked or smooth"
        )
    dense = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", SharedPrior(priors[0], outputs), unsafe=True)
    with torch.no_grad():
        drawn = made.get_parameter("parametrizations.weight.original")
        layer.get_parameter("parametrizations.weight.original0").copy_(drawn)
    if hasattr(made, "approximation_error"):
        note_error(layer, layer.weight, dense)
    return layer
