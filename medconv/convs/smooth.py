"""`conv=smooth`: new kernels are drawn from a Gaussian process in mm: smooth and central ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medconv.convs import filter_banks
from medconv.convs.linear import LinearPrior
from medconv.convs.parametrization import Conv, check_free, draws_only, install, rms

# defaults, in units of the layer's finest voxel axis
_EXTENT = 2.0
_LENGTH = 0.8


@draws_only(unless="throughout")
def smooth(
    conv: Conv,
    *,
    extent_mm: float | None = None,
    length_mm: float | None = None,
    floor: float = 0.3,
    throughout: bool = False,
    spacing_mm: Sequence[float] | None = None,
    scale: float = 1.0,
    init_from_weights: bool = False,
) -> nn.Module:
    """New weights are drawn from a Gaussian process over kernels, with the covariance P of `covariance`.

    So training begins with smooth kernels, and across thick slices taps vary less by themselves. The layer
    stays the plain convolution that it is.

    Args:
        conv: the convolution to give new weights to, in place.
        throughout: W = T P^(1/2) for each pair of channels, with T learned, of the kernel's own size: a step
            in T is a step in W preconditioned by P, and weight decay on T is the prior itself. P is
            invertible, so that every kernel is possible and pretrained weights are kept as they are.
        extent_mm: how far from the centre taps vary, at the network's input; None is twice each layer's
            finest voxel axis.
        length_mm: up to which distance taps vary together; None is 0.8 of that axis.
        floor: variance of each tap of its own, beside 1 of the centre.
        spacing_mm: voxel size on the layer's grid; None is isotropic.
        scale: the layer's grid over the input's.
        init_from_weights: keep the present (pretrained) weight instead of drawing one of its variance; has a
            meaning with `throughout` only.
    Raises:
        ValueError: an even kernel; spacing, a length, floor or scale not positive and finite; weights
            kept without `throughout`.
    Weights: out * in * k^N.
    Source: covariance of initial weights, Trockman et al. 2022, arXiv:2210.03651; trained filters are
        correlated in space, Fortuin et al. 2021, arXiv:2102.06571.
    """
    # lengths on the layer's grid, whose voxels may be coarser than the image's
    spacing = filter_banks.spacing_or_isotropic(spacing_mm, conv.kernel_size)
    filter_banks.check_grid(conv.kernel_size, spacing)
    layer_extent_mm = _EXTENT * min(spacing) if extent_mm is None else extent_mm * scale
    layer_length_mm = _LENGTH * min(spacing) if length_mm is None else length_mm * scale
    settings = {"extent_mm": layer_extent_mm, "length_mm": layer_length_mm, "floor": floor, "scale": scale}
    for name, value in settings.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    eigenvalues, eigenvectors = torch.linalg.eigh(
        covariance(conv.kernel_size, spacing, layer_extent_mm, layer_length_mm, floor)
    )
    # the symmetric root P^(1/2): white noise times it has covariance P
    root = eigenvectors @ eigenvalues.sqrt().diag() @ eigenvectors.T
    if throughout:
        return install(conv, LinearPrior(conv.kernel_size, root[None]), init_from_weights)
    if init_from_weights:
        raise ValueError("init_from_weights=true keeps the weights: then only throughout=true does anything")
    check_free(conv)
    with torch.no_grad():
        weight = conv.weight
        precise = torch.promote_types(weight.dtype, torch.float32)
        mixture = root.float().to(weight.device, precise)
        # for each pair of channels, white noise along the taps: (out, taps, in)
        noise = torch.randn(len(weight), len(root), weight.shape[1], dtype=weight.dtype, device=weight.device)
        drawn = torch.matmul(mixture, noise.to(precise)).to(weight.dtype)
        # scaled to the size of the weights before
        noise *= rms(weight) / rms(drawn.transpose(1, 2).contiguous())
        weight.copy_(torch.matmul(mixture, noise.to(precise)).transpose(1, 2).view_as(weight))
    return conv


def covariance(
    kernel_size: Sequence[int], spacing_mm: Sequence[float], extent_mm: float, length_mm: float, floor: float
) -> Tensor:
    """exp(-(|x|^2 + |y|^2) / 4 extent^2 - |x - y|^2 / 2 length^2) + floor [x = y] for taps at x and y.

    Shape:
        (taps, taps), float64, scaled so that its trace is the number of taps.
    Raises:
        ValueError: an even kernel axis, or spacings that are too many, too few or not positive.
    """
    filter_banks.check_grid(kernel_size, spacing_mm)
    coordinates = [grid.flatten() for grid in filter_banks.tap_positions_mm(kernel_size, spacing_mm)]
    positions = torch.stack(coordinates, 1)  # (taps, axes), mm
    from_centre = (positions / extent_mm).square().sum(1)
    offsets = positions[:, None] - positions[None]
    apart = (offsets / length_mm).square().sum(2)
    envelope = (from_centre[:, None] + from_centre[None]) / 4
    # Divided by 1 + floor: the centre tap then has variance 1, before the trace is scaled.
    taps = torch.exp(-envelope - apart / 2) / (1 + floor)
    taps += floor / (1 + floor) * torch.eye(len(taps), dtype=taps.dtype)
    return taps * (len(taps) / taps.trace())
