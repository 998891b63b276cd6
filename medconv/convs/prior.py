"""What all weight-space priors share: parameters in, the dense kernel of a plain `nn.ConvNd` out.

A prior is a parametrization of a convolution's weight. Autograd, DDP, `torch.compile` and cuDNN then see one library
convolution. All priors are linear in their parameters, so the dense kernel nearest to a given one is a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Unsuitable(ValueError):
    """This convolution has no meaning for that layer; `swap_convs` keeps the layer and reports `reason`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Prior(nn.Module):
    """Any parametrization of this package; `fold_convs` removes them and no others."""


class WeightPrior(Prior):
    """A dense kernel computed from a three-axis parameter.

    Shape: original (rows, coefficients, columns) -> weight (out, in, *kernel_size), rows and columns being a
        subclass's own. Three axes, as `Module.to(memory_format=channels_last)` raises on four in 3D and five in 2D.
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
        """The dense kernel, computed in fp32 or better also inside autocast: in bf16 it would not equal the folded one.

        Taps before input channels is channels-last already; a layer that is not channels-last pays one copy.
        """
        with torch.autocast(original.device.type, enabled=False):
            taps = self.taps(original.to(torch.promote_types(original.dtype, torch.float32)))
            weight = taps.unflatten(1, self.kernel_size).movedim(-1, 1).to(original.dtype)
        return weight.contiguous(memory_format=self.memory_format)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Projects a dense (pretrained) weight into the prior."""
        return self.nearest(weight.detach().double().flatten(2).transpose(1, 2)).to(weight.dtype).contiguous()

    @property
    def memory_format(self) -> torch.memory_format:
        """What `.to(memory_format=...)` asked of this layer."""
        wanted = _CHANNELS_LAST.get(self.layout.ndim)
        last = wanted is not None and self.layout.is_contiguous(memory_format=wanted)
        return wanted if last and wanted is not None else torch.contiguous_format


def install(layer: Any, prior: nn.Module, keep_weight: bool) -> nn.Module:
    """Put a prior on a layer's weight, in place: drawn anew with the variance of the weight it replaces, or projected.

    A projection leaves its relative error (Frobenius norm) as `layer.approximation_error`.
    """
    check_free(layer)
    dense = layer.weight.detach().clone()
    prior.to(dense)
    parametrize.register_parametrization(layer, "weight", prior, unsafe=True)  # projects through right_inverse
    if keep_weight:
        note_error(layer, layer.weight, dense)
    else:
        draw(layer.get_parameter("parametrizations.weight.original"), lambda: layer.weight, rms(dense))
    return layer


def check_free(layer: nn.Module) -> None:
    """Raises: Unsuitable: the weight carries a parametrization already."""
    if parametrize.is_parametrized(layer, "weight"):
        raise Unsuitable(f"{type(layer).__name__} has a parametrized weight already", "parametrized already")


def check_plain_groups(conv: Conv, name: str) -> None:
    """Raises: Unsuitable: a grouped convolution."""
    if conv.groups != 1:
        raise Unsuitable(f"conv={name} needs groups=1, got {conv.groups}", "grouped")


def rms(weight: Tensor) -> float:
    return float(weight.detach().double().square().mean().sqrt())


@torch.no_grad()
def draw(original: Tensor, weight: Callable[[], Tensor], target: float) -> None:
    """Random parameters, scaled so that the kernel they make has the root mean square `target`."""
    original.normal_()
    made = rms(weight())
    if made == 0:
        raise ValueError("the bank or mask makes every weight zero, nothing could be learned")
    original.mul_(target / made)


def note_error(module: Any, made: Tensor, wanted: Tensor) -> None:
    """Record how far a kept weight is from the one it stands for."""
    if made.shape == wanted.shape:
        scale = max(float(wanted.double().norm()), 1e-30)
        module.approximation_error = float((made.detach().double() - wanted.double()).norm()) / scale
