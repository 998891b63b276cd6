"""Weight-space priors: parametrizations that compute the weight of a plain `nn.ConvNd`.

Parameters in, dense kernel out, then one library convolution, so autograd, DDP, `torch.compile` and cuDNN see
nothing unusual. Each public function takes a convolution and returns the module that stands in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.convs.kernels import gaussian_jet

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class TransformPrior(nn.Module):
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
        super().__init__()
        groups, per_group, width, *kernel_size = bank.shape
        self.groups, self.kernel_size = groups, tuple(kernel_size)
        # Three axes: `Module.to(memory_format=channels_last)` raises on tensors of four (in 3D) or five (in 2D).
        self.register_buffer("bank", bank.reshape(groups * per_group, width, prod(kernel_size)).contiguous())

    @property
    def _blocks(self) -> Tensor:  # (groups, out / groups * kernel, width)
        out, width, taps = self.bank.shape
        blocks = self.bank.view(self.groups, out // self.groups, width, taps)
        return blocks.transpose(2, 3).reshape(self.groups, -1, width)

    def forward(self, original: Tensor) -> Tensor:
        """The dense kernel, computed in fp32 or better also inside autocast: in bf16 it would not equal the folded one."""
        with torch.autocast(original.device.type, enabled=False):
            dtype = torch.promote_types(original.dtype, torch.float32)
            transform = original.to(dtype).view(self.groups, -1, original.shape[1])
            weight = torch.bmm(self._blocks.to(dtype), transform)
            weight = weight.view(self.bank.shape[0], prod(self.kernel_size), -1).transpose(1, 2)
            return weight.reshape(self.bank.shape[0], -1, *self.kernel_size).to(original.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The transform whose folded weight is nearest to a dense weight, in the least-squares sense."""
        out, in_channels = weight.shape[:2]
        taps = weight.detach().double().reshape(out, in_channels, -1).transpose(1, 2)
        taps = taps.reshape(self.groups, -1, in_channels)
        solution = torch.linalg.pinv(self._blocks.double()) @ taps
        return solution.reshape(-1, in_channels).to(weight.dtype)

    def initialise(self, original: Tensor, std: float) -> None:
        """Random transform whose folded weight has the given standard deviation."""
        gain = self.bank.square().sum(1).mean().sqrt()
        nn.init.normal_(original, std=std / float(gain))


def transform(
    conv: Conv,
    *,
    transform_channels: int | None = None,
    bank: Tensor | None = None,
    spacing_mm: Sequence[float] | None = None,
    keep_weight: bool = False,
) -> nn.Module:
    """A learned 1x1 channel transform, then a fixed anatomical filter bank, folded into one kernel.

    Args:
        conv: the convolution to give the prior to, changed in place; `groups` must be 1.
        transform_channels: how many channels the transform has; None is as many as `conv` has outputs.
        bank: fixed filters (out, transform_channels, *kernel_size) of your own; None builds the Gaussian jet's.
        spacing_mm: voxel size on the layer's grid, for the built bank; None is isotropic.
        keep_weight: project the present (pretrained) weight instead of drawing a new one of its variance.
    Raises: ValueError: a grouped convolution, an even kernel, no transform channels, a bank of the wrong shape.
    """
    if conv.groups != 1:
        raise ValueError(f"conv=transform needs groups=1, got {conv.groups}")
    width = conv.out_channels if transform_channels is None else transform_channels
    if width < 1:
        raise ValueError(f"transform_channels must be at least 1, got {width}")
    if bank is None:
        blocks = _jet_blocks(conv.out_channels, width, conv.kernel_size, spacing_mm)
    elif tuple(bank.shape) != (conv.out_channels, width, *conv.kernel_size):
        need = (conv.out_channels, width, *conv.kernel_size)
        raise ValueError(f"bank must have shape (out, transform_channels, *kernel_size) = {need}, got {tuple(bank.shape)}")
    else:
        blocks = bank.unsqueeze(0)
    return _parametrize(conv, TransformPrior(blocks), keep_weight)


def _jet_blocks(out: int, width: int, kernel_size: Sequence[int], spacing_mm: Sequence[float] | None) -> Tensor:
    """In each block, output o sees transform channel t through filter (o + t) mod F.

    Shape: (groups, out / groups, width / groups, *kernel_size).
    """
    jet = gaussian_jet(kernel_size, spacing_mm)
    groups = _block_count(out, width, len(jet))
    index = torch.arange(out // groups)[:, None] + torch.arange(width // groups)[None, :]
    return jet[index % len(jet)].expand(groups, *index.shape, *kernel_size)


def _block_count(out: int, width: int, filters: int) -> int:
    """The fewest blocks in which no two outputs of a block have the same filters."""
    shared = gcd(out, width)
    return next((g for g in range(1, shared + 1) if shared % g == 0 and out // g <= filters), shared)


def _parametrize(conv: Conv, prior: TransformPrior, keep_weight: bool) -> nn.Module:
    std = float(conv.weight.detach().std())
    prior.to(conv.weight.device)
    parametrize.register_parametrization(conv, "weight", prior, unsafe=True)  # projects the weight through right_inverse
    if not keep_weight:
        prior.initialise(conv.get_parameter("parametrizations.weight.original"), std)
    return conv
