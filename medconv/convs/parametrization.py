"""What all weight-space priors share: parameters in, the dense kernel of a plain `nn.ConvNd` out.

A prior is a parametrization of a convolution's weight. Autograd, DDP, `torch.compile` and cuDNN then see one
library convolution. All priors are linear: the kernel nearest to a given dense one is a projection.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class UnsuitableLayerError(ValueError):
    """The convolution cannot replace this layer; `swap_convs` keeps the layer and reports `reason`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Prior(nn.Module):
    """Any parametrization of this package; `fold_convs` removes them and no others."""


class WeightPrior(Prior):
    """A dense kernel computed from a three-axis parameter.

    Shape: original (rows, coefficients, columns), as each subclass defines -> weight (out, in, *kernel_size).
    `Module.to(memory_format=...)` would raise for an original of four axes in 3D and of five in 2D.
    """

    layout: Tensor

    def __init__(self, kernel_size: Sequence[int]) -> None:
        super().__init__()
        self.kernel_size = tuple(kernel_size)
        # `.to(memory_format=...)` changes the strides of this buffer as it would change a plain weight's.
        self.register_buffer("layout", torch.zeros(1, 2, *[2] * len(self.kernel_size)), persistent=False)

    def taps(self, original: Tensor) -> Tensor:
        """The kernel as (out, taps, in)."""
        raise NotImplementedError

    def nearest(self, taps: Tensor) -> Tensor:
        """The original whose kernel is nearest, in the least-squares sense, to these taps (out, taps, in)."""
        raise NotImplementedError

    def forward(self, original: Tensor) -> Tensor:
        """The dense kernel, in fp32 or better even inside autocast: a bf16 one would differ from the folded.

        With taps before input channels the kernel is channels-last already; other layers need one copy.
        """
        with torch.autocast(original.device.type, enabled=False):
            taps = self.taps(original.to(torch.promote_types(original.dtype, torch.float32)))
            weight: Tensor = taps.unflatten(1, self.kernel_size).movedim(-1, 1).to(original.dtype)
        return weight.contiguous(memory_format=self.memory_format)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Projects a dense (pretrained) weight into the prior."""
        return self.nearest(weight.detach().double().flatten(2).transpose(1, 2)).to(weight.dtype).contiguous()

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format that `.to(memory_format=...)` set for this layer."""
        last = CHANNELS_LAST.get(self.layout.ndim, torch.contiguous_format)
        return last if self.layout.is_contiguous(memory_format=last) else torch.contiguous_format


class Foldable(nn.Module):
    """A module of this package that `fold_convs` replaces by plain torch modules, the result of `folded`."""

    def folded(self) -> nn.Module:
        raise NotImplementedError


def install(
    layer: Conv, prior: nn.Module, init_from_weights: bool, mixin: type[nn.Module] | None = None
) -> nn.Module:
    """Put a prior on a layer's weight, in place.

    The new weight is either random with the variance of the old one, or a projection of it. A projection
    stores its relative error (Frobenius norm) in `layer.approximation_error`.
    Args: mixin: base class to put before the layer's class, to override `forward`.
    Raises: ValueError: the layer cannot have this prior; it is unchanged.
    """
    check_free(layer)
    dense = layer.weight.detach().clone()
    prior.to(dense).train(layer.training)
    first = None if init_from_weights else drawn(prior, dense)
    if mixin is not None:
        layer.__class__ = type(f"{mixin.__name__}{type(layer).__name__}", (mixin, type(layer)), {})
    # This projects the present weight through right_inverse.
    parametrize.register_parametrization(layer, "weight", prior, unsafe=True)
    layer.train(layer.training)
    if first is None:
        note_error(layer, layer.weight, dense)
    else:
        with torch.no_grad():
            layer.get_parameter("parametrizations.weight.original").copy_(first)
    return layer


def check_free(layer: nn.Module) -> None:
    """Raises: UnsuitableLayerError: no values in the weight, or something computes them."""
    if parametrize.is_parametrized(layer, "weight"):
        raise UnsuitableLayerError(
            f"{type(layer).__name__} has a parametrized weight already", "parametrized already"
        )
    if "weight" not in layer._parameters:
        raise UnsuitableLayerError(
            f"{type(layer).__name__} has no weight parameter of its own", "weight computed already"
        )
    weight = layer.get_parameter("weight")
    if nn.parameter.is_lazy(weight) or weight.is_meta:
        raise UnsuitableLayerError(
            f"{type(layer).__name__} has no values in its weight yet (lazy, or on the meta device)", "empty"
        )


def has_own_forward(conv: nn.Module) -> bool:
    """Whether a subclass changed what torch's convolution does with its weight."""
    return type(conv).forward not in {c.forward for c in CONVS}


def check_replaceable(conv: Any, name: str) -> None:
    """Raises: UnsuitableLayerError: plain layers in its place would lose something of the convolution."""
    check_plain_groups(conv, name)
    if has_own_forward(conv):
        raise UnsuitableLayerError(
            f"conv={name} cannot replace {type(conv).__name__}, which has a forward of its own", "own forward"
        )
    check_free(conv)


def check_plain_groups(conv: Conv, name: str) -> None:
    """Raises: UnsuitableLayerError: a grouped convolution."""
    if conv.groups != 1:
        raise UnsuitableLayerError(f"conv={name} needs groups=1, got {conv.groups}", "grouped")


def rms(weight: Tensor) -> float:
    return float(weight.detach().double().square().mean().sqrt())


@torch.no_grad()
def drawn(prior: Any, dense: Tensor) -> Tensor:
    """Random parameters whose kernel has the rms of `dense`. Raises: ValueError: every kernel is zero."""
    original = torch.randn_like(prior.right_inverse(dense))
    kernel_rms = rms(prior(original))
    if kernel_rms == 0:
        raise ValueError("the bank or mask makes every weight zero, nothing could be learned")
    return original * (rms(dense) / kernel_rms)


def note_error(module: Any, made: Tensor, target: Tensor) -> None:
    """Store the relative error of an approximated weight in `module.approximation_error`."""
    if made.shape == target.shape:
        scale = max(float(target.double().norm()), 1e-30)
        module.approximation_error = float((made.detach().double() - target.double()).norm()) / scale


def replace(network: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of another, under all its names. Raises: ValueError: it is the network."""
    old = network.get_submodule(name)
    if new is old:  # changed in place
        return
    if not name:
        raise ValueError(
            f"a bare {type(network).__name__} cannot be replaced inside itself: call the conv on it"
        )
    for place, module in list(network.named_modules(remove_duplicate=False)):
        if module is old:
            parent, _, child = place.rpartition(".")
            setattr(network.get_submodule(parent), child, new)
