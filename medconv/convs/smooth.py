"""`conv=smooth`: a Gaussian-process prior over kernels: smooth and central ones first, none is cut off."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medconv.convs import filter_banks
from medconv.convs.linear import LinearPrior
from medconv.convs.parametrization import Conv, install

_EXTENT, _LENGTH = 2.0, 0.8  # of the finest voxel axis


def smooth(
    conv: Conv,
    *,
    extent_mm: float | None = None,
    length_mm: float | None = None,
    floor: float = 0.3,
    spacing_mm: Sequence[float] | None = None,
    scale: float = 1.0,
    init_from_weights: bool = False,
) -> nn.Module:
    """Every kernel is possible, smooth and central ones are learned first: W = T P^(1/2) for each pair of
    channels, with T learned, of the kernel's own size, and P the covariance of `covariance`.

    New weights are drawn from the prior; a step in T is a step in W preconditioned by P, and weight decay on
    T is the prior itself. Across thick slices taps vary less by themselves. P is invertible, so that
    pretrained weights are kept as they are.
    Args:
        conv: the convolution to give the prior to, changed in place.
        extent_mm: how far from the centre taps vary, at the network's input; None is twice each layer's
            finest voxel axis.
        length_mm: up to which distance taps vary together; None is 0.8 of that axis.
        floor: variance of each tap of its own, beside 1 of the centre.
        spacing_mm: voxel size on the layer's grid; None is isotropic.
        scale: the layer's grid over the input's.
        init_from_weights: keep the present (pretrained) weight instead of drawing one of its variance.
    Raises: ValueError: an even kernel; spacing, a length or floor not positive.
    Weights: out * in * k^N.
    Source: covariance of initial weights, Trockman et al. 2022, arXiv:2210.03651; trained filters are
        correlated in space, Fortuin et al. 2021, arXiv:2102.06571.
    """
    spacing = (1.0,) * len(conv.kernel_size) if spacing_mm is None else tuple(spacing_mm)
    filter_banks.check_grid(conv.kernel_size, spacing)
    extent = _EXTENT * min(spacing) if extent_mm is None else extent_mm * scale
    length = _LENGTH * min(spacing) if length_mm is None else length_mm * scale
    for name, value in {"extent_mm": extent, "length_mm": length, "floor": floor}.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    values, vectors = torch.linalg.eigh(covariance(conv.kernel_size, spacing, extent, length, floor))
    root = vectors @ values.sqrt().diag() @ vectors.T
    return install(conv, LinearPrior(conv.kernel_size, root[None]), init_from_weights)


def covariance(
    kernel_size: Sequence[int],
    spacing_mm: Sequence[float],
    extent_mm: float,
    length_mm: float,
    floor: float,
) -> Tensor:
    """exp(-(|x|^2 + |y|^2) / 4 extent^2 - |x - y|^2 / 2 length^2) + floor [x = y] for taps at x and y.

    Shape: (taps, taps), float64, scaled so that its trace is the number of taps.
    Raises: ValueError: an even kernel axis, or spacings that are too many, too few or not positive.
    """
    filter_banks.check_grid(kernel_size, spacing_mm)
    places = torch.stack([grid.flatten() for grid in filter_banks.places(kernel_size, spacing_mm)], 1)
    near = places.square().sum(1)
    apart = (places[:, None] - places[None]).square().sum(2)
    taps = torch.exp(-(near[:, None] + near[None]) / (4 * extent_mm**2) - apart / (2 * length_mm**2))
    taps += floor * torch.eye(len(taps), dtype=taps.dtype)
    return taps * (len(taps) / taps.trace())
