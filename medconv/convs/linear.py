"""Kernels as learned sums of fixed kernels: `basis`, `ball` and `spacing`; `acs` has a file of its own.

Each tap of a kernel is a fixed mixture of learned coefficients, separately for every pair of channels:
W[o, k, i] = sum over f of B[k, f] C[o, f, i].
"""

from collections.abc import Sequence
from functools import reduce
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from medconv.convs import filter_banks
from medconv.convs.parametrization import Conv, UnsuitableLayerError, WeightPrior, check_free, install

_MAX_TAPS = 10_000  # of a resampled kernel; 21 x 21 x 21 has 9261


class LinearPrior(WeightPrior):
    """W[o, k, i] = sum over f of B[k, f] C[o, f, i].

    Shape:
        original (out, coefficients, in / groups) -> weight (out, in / groups, *kernel_size).
    Args:
        kernel_size: in voxels, one number per axis.
        mixtures: (kinds, taps, coefficients), fixed.
        kind: (out,), the index of each output channel's mixture; None if all share one.
        persistent: whether the mixtures are saved in the state dict; False if they depend on the grid.
    """

    mixtures: Tensor
    kind: Tensor | None

    def __init__(
        self,
        kernel_size: Sequence[int],
        mixtures: Tensor,
        kind: Tensor | None = None,
        persistent: bool = True,
    ) -> None:
        super().__init__(kernel_size)
        # NCCL broadcasts only what lies in memory in order
        self.register_buffer("mixtures", mixtures.float().contiguous(), persistent)
        self.register_buffer("kind", kind)
        # `spacing` on its own grid: no multiplication needed
        self.identity = all(
            torch.equal(mixture, torch.eye(len(mixture), dtype=mixture.dtype)) for mixture in mixtures
        )

    def _per_output(self, mixtures: Tensor) -> Tensor:
        """One matrix for all outputs, or one for each."""
        return mixtures[0] if self.kind is None else mixtures[self.kind]

    def taps(self, original: Tensor) -> Tensor:
        if self.identity:
            return original
        mixtures = self.mixtures.to(original.dtype)
        return torch.matmul(self._per_output(mixtures), original)

    def nearest(self, taps: Tensor) -> Tensor:
        inverses = torch.linalg.pinv(self.mixtures.double())
        return torch.matmul(self._per_output(inverses), taps)


def basis(
    conv: Conv,
    *,
    bank: str | Sequence[str] | Tensor = "jet",
    sigma_mm: float | None = None,
    spacing_mm: Sequence[float] | None = None,
    scale: float = 1.0,
    init_from_weights: bool = False,
) -> nn.Module:
    """Every kernel is a learned sum of the same few filters, Gaussian derivatives by default.

    Args:
        conv: the convolution to give the prior to, changed in place.
        bank: names in `medconv.convs.filter_banks.BANKS`, or filters (filters, *kernel_size) of your own.
        sigma_mm: of the Gaussian at the network's input; None is 0.7 of each layer's finest voxel axis.
        spacing_mm: voxel size on the layer's grid; None is isotropic.
        scale: the layer's grid over the input's.
        init_from_weights: project the present (pretrained) weight instead of drawing one of its variance.
    Raises:
        ValueError: an even kernel; an unknown bank or wrong shape; spacing or sigma not positive.
    Weights: out * in * filters (3D: 10, 2D: 6), against out * in * k^N; weight decay acts on coefficients.
    Source: Jacobsen et al. 2016, arXiv:1605.02971.
    """
    if not isinstance(bank, Tensor):
        layer_sigma_mm = None if sigma_mm is None else sigma_mm * scale
        bank = filter_banks.filter_bank(bank, conv.kernel_size, spacing_mm, layer_sigma_mm)
    if tuple(bank.shape[1:]) != conv.kernel_size:
        expected = ("filters", *conv.kernel_size)
        raise ValueError(
            f"bank must have shape (filters, *kernel_size) = {expected}, got {tuple(bank.shape)}"
        )
    mixture = bank.flatten(1).t()  # (taps, filters)
    return install(conv, LinearPrior(conv.kernel_size, mixture[None]), init_from_weights)


def ball(
    conv: Conv,
    *,
    radius_mm: float | None = None,
    spacing_mm: Sequence[float] | None = None,
    scale: float = 1.0,
    init_from_weights: bool = False,
) -> nn.Module:
    """Support is a ball in mm, not a cube in voxels: taps outside it do not exist.

    Args:
        conv, spacing_mm, scale, init_from_weights: as `basis`.
        radius_mm: at the network's input; it grows with the voxels of deeper layers. None is half of the
            kernel's widest extent in voxels, times the finest spacing: 19 of 27 taps if isotropic in 3D.
    Raises:
        ValueError: an even kernel; spacing or radius not positive.
    Weights: out * in * taps in the ball.
    """
    spacing = filter_banks.spacing_or_isotropic(spacing_mm, conv.kernel_size)
    filter_banks.check_grid(conv.kernel_size, spacing)
    default_mm = max(conv.kernel_size) / 2 * min(spacing)
    layer_radius_mm = default_mm if radius_mm is None else radius_mm * scale
    inside = filter_banks.ball(conv.kernel_size, spacing, layer_radius_mm).flatten()
    mixture = torch.eye(len(inside))[:, inside]  # (taps, taps in the ball)
    return install(conv, LinearPrior(conv.kernel_size, mixture[None]), init_from_weights)


def spacing(
    conv: Conv,
    *,
    spacing_mm: Sequence[float] | None = None,
    reference_mm: float | None = None,
    scale: float = 1.0,
    init_from_weights: bool = False,
) -> nn.Module:
    """One kernel in mm, sampled by linear interpolation at the voxels of each dataset's grid.

    The learned kernel is defined on an isotropic grid of `reference_mm` with the size of the layer's kernel.
    On another grid it has more or fewer taps: `kernel_size` and `padding` are adapted, so that the output
    size stays the same. Each tap is weighted by the size of its voxel, so that a sum over voxels approximates
    the same integral over mm.

    Args:
        conv, scale: as `basis`.
        spacing_mm: voxel size on the layer's grid; needed.
        reference_mm: voxel size of the kernel's own grid at the network's input; None is the finest axis of
            the layer's grid. On another dataset take the spacing that the network was first trained on.
        init_from_weights: take the present weight as the kernel on its own grid, instead of a new one.
    Raises:
        ValueError: an even kernel; spacing_mm missing; spacing or reference not positive; padding that
            cannot follow; more than 10,000 taps.
    Weights: out * in * k^N, whatever the dataset's spacing.
    """
    if spacing_mm is None:
        raise ValueError(
            "spacing_mm is needed: voxel size of the layer's grid in mm, one number per axis, got None"
        )
    check_free(conv)
    filter_banks.check_grid(conv.kernel_size, spacing_mm)
    layer_reference_mm = min(spacing_mm) if reference_mm is None else reference_mm * scale
    if not layer_reference_mm > 0:
        raise ValueError(f"reference_mm must be positive, got {reference_mm}")
    axes = [
        _interpolation(size, layer_reference_mm, mm)
        for size, mm in zip(conv.kernel_size, spacing_mm, strict=True)
    ]
    mixture = reduce(torch.kron, axes)  # (new taps, taps): interpolation separates over axes
    new_size = [len(axis) for axis in axes]
    padding = _adapted_padding(conv, new_size)
    present_taps = conv.weight.detach().flatten(2).transpose(1, 2).clone()
    _resize(conv, new_size, padding)
    prior = LinearPrior(new_size, mixture[None], persistent=False)
    # Not projected from the resized weight: the present taps are the kernel itself.
    install(conv, prior, init_from_weights=False)
    if init_from_weights:
        with torch.no_grad():
            conv.get_parameter("parametrizations.weight.original").copy_(present_taps)
    return conv


def _interpolation(size: int, reference_mm: float, spacing_mm: float) -> Tensor:
    """Linear interpolation from `size` points, `reference_mm` apart, to voxels: a matrix (taps, size)."""
    if size == 1:
        return torch.ones(1, 1)
    reach_mm = (size // 2 + 1) * reference_mm  # the outermost hat function is 0 from here on
    # voxels on each side of the centre where some hat is not 0
    half = max(0, ceil(reach_mm / spacing_mm - 1e-6) - 1)
    # both in units of the reference grid, from the centre
    voxels = (torch.arange(2 * half + 1, dtype=torch.float64) - half) * spacing_mm / reference_mm
    points = torch.arange(size, dtype=torch.float64) - size // 2
    distance = (voxels[:, None] - points[None, :]).abs()
    hats = (1 - distance).clamp(min=0)
    return (hats * spacing_mm / reference_mm).float()


def _adapted_padding(conv: Conv, new_size: Sequence[int]) -> str | tuple[int, ...]:
    """The padding with which another kernel size keeps the output size.

    Raises:
        ValueError: there is none, or the kernel has too many taps.
    """
    if prod(new_size) > _MAX_TAPS:
        raise ValueError(
            f"spacing_mm makes a kernel of {tuple(new_size)} voxels: "
            "reference_mm is far coarser than the grid"
        )
    if conv.padding == "valid":
        raise UnsuitableLayerError(
            "conv=spacing changes the kernel's size, which needs numeric or 'same' padding", "unpadded"
        )
    if isinstance(conv.padding, str):
        return conv.padding
    padding = []
    axes = zip(conv.padding, conv.dilation, conv.kernel_size, new_size, strict=True)
    for old_padding, dilation, old_size, size in axes:
        # as much further as the kernel reaches further on each side
        padding.append(old_padding + dilation * (size // 2 - old_size // 2))
    if min(padding) < 0:
        raise UnsuitableLayerError(
            f"conv=spacing has no padding for a kernel of {tuple(new_size)} voxels", "unpadded"
        )
    return tuple(padding)


def _resize(conv: Any, new_size: Sequence[int], padding: str | tuple[int, ...]) -> None:
    """Change the kernel size in place; the weight becomes constant, the old rms * sqrt(old / new taps).

    So the sum over taps keeps its variance, and `install` draws new weights of that rms.
    """
    old = conv.weight.detach()
    gain = (prod(conv.kernel_size) / prod(new_size)) ** 0.5
    old_rms = float(old.square().mean().sqrt())
    new = old.new_full((*old.shape[:2], *new_size), old_rms * gain)
    conv.weight = nn.Parameter(new, conv.weight.requires_grad)
    conv.kernel_size = tuple(new_size)
    conv.padding = padding
    # What torch pads by before the convolution with another `padding_mode`: last axis first, both sides.
    both_sides: list[int] = []
    if isinstance(padding, tuple):
        for voxels in reversed(padding):
            both_sides += [voxels, voxels]
    else:  # "same": an odd number of voxels goes to the end
        for dilation, size in zip(reversed(conv.dilation), reversed(new_size), strict=True):
            total = dilation * (size - 1)
            both_sides += [total // 2, total - total // 2]
    conv._reversed_padding_repeated_twice = both_sides
