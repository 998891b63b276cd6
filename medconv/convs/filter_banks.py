"""Fixed filter banks, sampled in mm on a layer's voxel grid.

The weight-space priors of this package combine these banks, which are never learned. Every bank takes the
same arguments and returns (filters, *kernel_size), float32, each filter of unit Euclidean norm.
"""

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, product
from math import pi

import torch
from torch import Tensor

Sizes = Sequence[int]
Lengths = Sequence[float]


def gaussian_jet(
    kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None
) -> Tensor:
    """Gaussian and its first and second derivatives: blob, edges along each axis, lines and corners.

    Shape: (filters, *kernel_size), float32; 1 + N + N(N+1)/2 filters in N dimensions, so 6 in 2D and 10 in
    3D, each of unit Euclidean norm. An axis of length 1 has no derivative: the filters along it are left out.
    Args:
        kernel_size: odd, in voxels, one number per axis.
        spacing_mm: voxel size per axis; None is 1 mm along every axis.
        sigma_mm: width of the Gaussian; None takes 0.7 of the finest spacing, which a 3-kernel can hold.
    Raises: ValueError: an even kernel axis, or a spacing or sigma that is not positive.
    Source: Jacobsen et al. 2016, arXiv:1605.02971.
    """
    wide, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp(), *(_sampled(-grid, exponent) for grid in wide)]
    for a, b in combinations_with_replacement(range(len(wide)), 2):
        filters.append(_zero_mean(_sampled(wide[a] * wide[b] - float(a == b), exponent)))
    return _unit(filters)


def laplacian_of_gaussian(
    kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None
) -> Tensor:
    """Blobs at three scales: the Laplacian of a Gaussian of 1, 1.5 and 2 sigma; and the Gaussian itself.

    Shape, Args, Raises: as `gaussian_jet`; 4 filters, 1 where the kernel is a single voxel.
    Source: Marr and Hildreth 1980, doi:10.1098/rspb.1980.0020.
    """
    wide, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    if wide:
        for scale in (1.0, 1.5, 2.0):
            radius = torch.stack(wide).square().sum(0) / scale**2
            filters.append(_zero_mean(_sampled(len(wide) - radius, exponent / scale**2)))
    return _unit(filters)


def lines(kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None) -> Tensor:
    """Bright lines such as vessels: minus the second derivative across a line, one filter per direction.

    Directions join a voxel with its 8 neighbours in 2D (4 lines) or 26 in 3D (13 lines), in mm; the Gaussian
    comes first. Shape, Args, Raises: as `gaussian_jet`; 5 filters in 2D, 14 in 3D, 1 if fewer than two axes
    are longer than 1.
    Source: Sato et al. 1998, doi:10.1016/S1361-8415(98)80009-1 (line measure from the Hessian).
    """
    wide, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    if len(wide) > 1:
        radius = torch.stack(wide).square().sum(0)
        for along in _directions(wide, kernel_size, spacing_mm):
            filters.append(_zero_mean(_sampled(len(wide) - 1 - (radius - along.square()), exponent)))
    return _unit(filters)


def gabor(kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None) -> Tensor:
    """Even and odd waves of length 4 sigma under a Gaussian, a pair per direction: oriented texture, edges.

    Shape, Args, Raises: as `gaussian_jet`, the Gaussian first; 9 filters in 2D, 27 in 3D.
    Source: Daugman 1985, doi:10.1364/JOSAA.2.001160.
    """
    wide, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    for along in _directions(wide, kernel_size, spacing_mm):
        wave = along * (2 * pi / 4.0)
        filters += [_zero_mean(_sampled(wave.cos(), exponent)), _sampled(wave.sin(), exponent)]
    return _unit(filters)


BANKS: dict[str, Callable[[Sizes, Lengths | None, float | None], Tensor]] = {
    "jet": gaussian_jet,
    "laplacian": laplacian_of_gaussian,
    "lines": lines,
    "gabor": gabor,
}


def filter_bank(
    names: str | Sequence[str],
    kernel_size: Sizes,
    spacing_mm: Lengths | None = None,
    sigma_mm: float | None = None,
) -> Tensor:
    """One bank or several, concatenated, by their names in `BANKS`; a filter in several banks is used once.

    Raises: ValueError: an unknown name, or invalid arguments of a bank.
    """
    banks = [names] if isinstance(names, str) else list(names)
    if not banks or any(name not in BANKS for name in banks):
        raise ValueError(f"bank must be one of {sorted(BANKS)}, or a list of them, got {names!r}")
    filters = torch.cat([BANKS[name](kernel_size, spacing_mm, sigma_mm) for name in banks])
    distinct: list[Tensor] = []
    for candidate in filters:
        if not any(torch.allclose(candidate, filter_, atol=1e-6) for filter_ in distinct):
            distinct.append(candidate)
    return torch.stack(distinct)


def ball(kernel_size: Sizes, spacing_mm: Lengths, radius_mm: float) -> Tensor:
    """Which taps lie in a ball about the kernel's centre, which always does.

    Shape: kernel_size, bool. Raises: ValueError: as `gaussian_jet`, or a radius not positive.
    """
    check_grid(kernel_size, spacing_mm)
    if not radius_mm > 0:
        raise ValueError(f"radius_mm must be positive, got {radius_mm}")
    distance = torch.stack(places(kernel_size, spacing_mm)).square().sum(0).sqrt()
    return distance <= radius_mm * (1 + 1e-6)


def check_grid(kernel_size: Sizes, spacing_mm: Lengths) -> None:
    """Raises: ValueError: an even kernel axis; spacings too many or too few, or not positive and finite."""
    if any(k % 2 == 0 for k in kernel_size):
        raise ValueError(
            f"kernel_size must be odd along every axis for a kernel sampled in mm, got {tuple(kernel_size)}"
        )
    if len(spacing_mm) != len(kernel_size):
        raise ValueError(
            f"spacing_mm must have {len(kernel_size)} numbers, one per axis, got {tuple(spacing_mm)}"
        )
    check_spacing(spacing_mm)


def check_spacing(spacing_mm: Lengths) -> None:
    """Raises: ValueError: spacings that are not positive and finite."""
    if any(not 0 < s < float("inf") for s in spacing_mm):
        raise ValueError(f"spacing_mm must be positive and finite along every axis, got {tuple(spacing_mm)}")


def _gaussian(
    kernel_size: Sizes, spacing_mm: Lengths | None, sigma_mm: float | None
) -> tuple[list[Tensor], Tensor]:
    """Positions along each axis longer than 1 in units of sigma, and the exponent of the Gaussian there."""
    spacing = tuple(spacing_mm) if spacing_mm is not None else (1.0,) * len(kernel_size)
    check_grid(kernel_size, spacing)
    sigma = 0.7 * min(spacing) if sigma_mm is None else sigma_mm
    if not sigma > 0:
        raise ValueError(f"sigma_mm must be positive, got {sigma}")
    grids = [grid / sigma for grid in places(kernel_size, spacing)]
    wide = [grid for grid, k in zip(grids, kernel_size, strict=True) if k > 1]
    return wide, -0.5 * torch.stack(grids).square().sum(0)


def places(kernel_size: Sizes, spacing_mm: Lengths) -> list[Tensor]:
    """The distance of each tap from the kernel's centre along each axis, in mm; each of shape kernel_size."""
    voxels = [torch.arange(k, dtype=torch.float64) - k // 2 for k in kernel_size]
    axes = [axis * mm for axis, mm in zip(voxels, spacing_mm, strict=True)]
    return list(torch.meshgrid(*axes, indexing="ij"))


def _directions(wide: list[Tensor], kernel_size: Sizes, spacing_mm: Lengths | None) -> list[Tensor]:
    """Position along each line through a voxel and its neighbours, in units of sigma, one of both ways."""
    spacing = [1.0] * len(kernel_size) if spacing_mm is None else spacing_mm
    steps = torch.tensor([s for s, k in zip(spacing, kernel_size, strict=True) if k > 1], dtype=torch.float64)
    positions = []
    for sign in product((-1, 0, 1), repeat=len(wide)):
        if next((s for s in sign if s), 0) > 0:
            direction = steps * torch.tensor(sign, dtype=torch.float64)
            direction /= direction.norm()
            positions.append(torch.stack([d * grid for d, grid in zip(direction, wide, strict=True)]).sum(0))
    return positions


def _sampled(factor: Tensor, exponent: Tensor) -> Tensor:
    """factor * exp(exponent), up to a scale: on a coarse axis the Gaussian itself is 0 in floating point."""
    return factor * (exponent - exponent[factor != 0].max()).clamp(max=0).exp()


def _zero_mean(values: Tensor) -> Tensor:
    """No response to a constant, also when sampled."""
    return values - values.mean()


def _unit(filters: list[Tensor]) -> Tensor:
    return torch.stack([f / f.norm() for f in filters]).float()
