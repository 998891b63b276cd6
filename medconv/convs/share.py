"""`conv.share`: some of each layer's kernels by a prior, the others plain."""

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

    Shape:
        original0, as the prior has it; original1 (out - outputs, in, *kernel_size)
        -> weight (out, in, *kernel_size).
    Args:
        prior: of the first output channels.
        outputs: how many channels have it.
    """

    def __init__(self, prior: WeightPrior, outputs: int) -> None:
        super().__init__()
        self.prior = prior
        self.outputs = outputs

    def forward(self, original: Tensor, plain: Tensor) -> Tensor:
        weight = torch.cat([self.prior(original), plain])
        return weight.contiguous(memory_format=self.prior.memory_format)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        original = self.prior.right_inverse(weight[: self.outputs])
        plain = weight[self.outputs :].detach().clone()
        return original, plain


def shared(layer: Conv, conv: Callable[..., Any], share: float, **settings: Any) -> nn.Module:
    """Put a prior on a share of a layer's output channels, in place.

    Args:
        layer: a convolution with at least two output channels.
        conv: one of this package's weight-space priors, as `swap_convs` takes it.
        share: of the output channels, more than 0 and less than 1; at least one has the prior, and one not.
        settings: for `conv`.
    Raises:
        UnsuitableLayerError: grouped, or one output channel.
        ValueError: no weight-space prior that keeps the kernel's size; as `conv`.
    """
    check_plain_groups(layer, "share")
    if layer.out_channels < 2:
        raise UnsuitableLayerError("share needs two output channels", "one output channel")
    # at least one output of each kind
    outputs = round(share * layer.out_channels)
    outputs = min(max(1, outputs), layer.out_channels - 1)
    # The prior is drawn or projected for a layer that has these outputs alone, and then moved.
    first_outputs = _first_outputs(layer, outputs)
    converted: Any = conv(first_outputs, **settings)
    prior = _only_prior(converted, first_outputs, layer)
    if prior is None:  # new weights alone
        with torch.no_grad():
            layer.weight[:outputs].copy_(converted.weight)
        return layer
    dense = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", SharedPrior(prior, outputs), unsafe=True)
    with torch.no_grad():
        original = converted.get_parameter("parametrizations.weight.original")
        layer.get_parameter("parametrizations.weight.original0").copy_(original)
    if hasattr(converted, "approximation_error"):
        note_error(layer, layer.weight, dense)
    return layer


def _first_outputs(layer: Conv, outputs: int) -> Any:
    """A copy of a convolution, without bias, that has its first output channels alone."""
    narrow: Any = deepcopy(layer)
    narrow.out_channels = outputs
    weight = layer.weight.detach()[:outputs].clone()
    narrow.weight = nn.Parameter(weight, layer.weight.requires_grad)
    narrow.bias = None
    return narrow


def _only_prior(converted: Any, first_outputs: Any, layer: Conv) -> WeightPrior | None:
    """The prior that a convolution put on a layer's first outputs; None: it only gave them new weights.

    Raises:
        ValueError: it did something else, which cannot be done to some outputs alone.
    """
    class_of = parametrize.type_before_parametrizations
    is_same_layer = (
        converted is first_outputs
        and class_of(converted) is class_of(layer)  # not so for `transform`, whose forward may use no kernel
        and converted.kernel_size == layer.kernel_size
    )
    priors = []
    if parametrize.is_parametrized(converted, "weight"):
        priors = list(converted.parametrizations.weight)
    if is_same_layer and not priors:
        return None
    if is_same_layer and len(priors) == 1 and isinstance(priors[0], WeightPrior):
        return priors[0]
    raise ValueError(
        "share needs kernels of the layer's own size, as those of acs, ball, basis, smooth, and of "
        "masked with a mask of 0 and 1"
    )
