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
Bank = Callable[[Sizes, Lengths | None, float | None], Tensor]
_DEFAULT_SIGMA = 0.7  # of the finest voxel axis; a kernel of 3 voxels can hold this Gaussian
_BLOB_SCALES = (1.0, 1.5, 2.0)  # of sigma
_WAVELENGTH = 4.0  # in sigma


def gaussian_jet(
    kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None
) -> Tensor:
    """Gaussian and its first and second derivatives: blob, edges along each axis, lines and corners.

    Shape:
        (filters, *kernel_size), float32; 1 + N + N(N+1)/2 filters in N dimensions, so 6 in 2D and 10 in 3D,
        each of unit Euclidean norm. An axis of length 1 has no derivative: the filters along it are left out.
    Args:
        kernel_size: odd, in voxels, one number per axis.
        spacing_mm: voxel size per axis; None is 1 mm along every axis.
        sigma_mm: width of the Gaussian; None takes 0.7 of the finest spacing, which a 3-kernel can hold.
    Raises:
        ValueError: an even kernel axis, or a spacing or sigma that is not positive.
    Source: Jacobsen et al. 2016, arXiv:1605.02971.
    """
    coordinates, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    for x in coordinates:
        filters.append(_sampled(-x, exponent))
    # Second derivatives are Hermite polynomials times the Gaussian: x^2 - 1 along an axis, x y across two.
    for a, b in combinations_with_replacement(range(len(coordinates)), 2):
        hermite = coordinates[a] * coordinates[b] - float(a == b)
        filters.append(_zero_mean(_sampled(hermite, exponent)))
    return _unit(filters)


def laplacian_of_gaussian(
    kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None
) -> Tensor:
    """Blobs at three scales: the Laplacian of a Gaussian of 1, 1.5 and 2 sigma; and the Gaussian itself.

    Shape, Args, Raises: as `gaussian_jet`; 4 filters, 1 where the kernel is a single voxel.
    Source: Marr and Hildreth 1980, doi:10.1098/rspb.1980.0020.
    """
    coordinates, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    if coordinates:
        for scale in _BLOB_SCALES:
            squared_radius = torch.stack(coordinates).square().sum(0) / scale**2
            laplacian = _sampled(len(coordinates) - squared_radius, exponent / scale**2)
            filters.append(_zero_mean(laplacian))
    return _unit(filters)


def lines(kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None) -> Tensor:
    """Bright lines such as vessels: minus the second derivative across a line, one filter per direction.

    Directions join a voxel with its 8 neighbours in 2D (4 lines) or 26 in 3D (13 lines), in mm; the Gaussian
    comes first.

    Shape, Args, Raises: as `gaussian_jet`; 5 filters in 2D, 14 in 3D, 1 if fewer than two axes are longer
    than 1.
    Source: Sato et al. 1998, doi:10.1016/S1361-8415(98)80009-1 (line measure from the Hessian).
    """
    coordinates, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    if len(coordinates) > 1:
        axes_across = len(coordinates) - 1
        squared_radius = torch.stack(coordinates).square().sum(0)
        for along in _directions(coordinates, kernel_size, spacing_mm):
            squared_distance = squared_radius - along.square()  # from the line
            filters.append(_zero_mean(_sampled(axes_across - squared_distance, exponent)))
    return _unit(filters)


def gabor(kernel_size: Sizes, spacing_mm: Lengths | None = None, sigma_mm: float | None = None) -> Tensor:
    """Even and odd waves of length 4 sigma under a Gaussian, a pair per direction: oriented texture, edges.

    Shape, Args, Raises: as `gaussian_jet`, the Gaussian first; 9 filters in 2D, 27 in 3D.
    Source: Daugman 1985, doi:10.1364/JOSAA.2.001160.
    """
    coordinates, exponent = _gaussian(kernel_size, spacing_mm, sigma_mm)
    filters = [exponent.exp()]
    for along in _directions(coordinates, kernel_size, spacing_mm):
        phase = along * (2 * pi / _WAVELENGTH)
        filters.append(_zero_mean(_sampled(phase.cos(), exponent)))
        filters.append(_sampled(phase.sin(), exponent))  # odd, so its mean is zero already
    return _unit(filters)


BANKS: dict[str, Bank] = {
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

    Shape:
        (filters, *kernel_size), float32.
    Raises:
        ValueError: an unknown name, or invalid arguments of a bank.
    """
    bank_names = [names] if isinstance(names, str) else list(names)
    if not bank_names or any(name not in BANKS for name in bank_names):
        raise ValueError(f"bank must be one of {sorted(BANKS)}, or a list of them, got {names!r}")
    banks = [BANKS[name](kernel_size, spacing_mm, sigma_mm) for name in bank_names]
    filters = torch.cat(banks)
    # Every bank holds the Gaussian, and several hold the same edges.
    distinct: list[Tensor] = []
    for candidate in filters:
        is_repeated = any(torch.allclose(candidate, filter_, atol=1e-6) for filter_ in distinct)
        if not is_repeated:
            distinct.append(candidate)
    return torch.stack(distinct)


def ball(kernel_size: Sizes, spacing_mm: Lengths, radius_mm: float) -> Tensor:
    """Which taps lie in a ball about the kernel's centre, which always does.

    Shape:
        kernel_size, bool.
    Raises:
        ValueError: as `gaussian_jet`, or a radius not positive.
    """
    check_grid(kernel_size, spacing_mm)
    if not radius_mm > 0:
        raise ValueError(f"radius_mm must be positive, got {radius_mm}")
    coordinates = torch.stack(tap_positions_mm(kernel_size, spacing_mm))
    distance_mm = coordinates.square().sum(0).sqrt()
    # taps on the sphere belong to the ball, whatever the rounding
    return distance_mm <= radius_mm * (1 + 1e-6)


def spacing_or_isotropic(spacing_mm: Lengths | None, kernel_size: Sizes) -> tuple[float, ...]:
    """A voxel size as given, or 1 mm along every axis of the kernel."""
    if spacing_mm is None:
        return (1.0,) * len(kernel_size)
    return tuple(spacing_mm)


def check_grid(kernel_size: Sizes, spacing_mm: Lengths) -> None:
    """Check that a kernel can be sampled in mm.

    Raises:
        ValueError: an even kernel axis; spacings too many or too few, or not positive and finite.
    """
    if any(size % 2 == 0 for size in kernel_size):
        raise ValueError(
            f"kernel_size must be odd along every axis for a kernel sampled in mm, got {tuple(kernel_size)}"
        )
    if len(spacing_mm) != len(kernel_size):
        raise ValueError(
            f"spacing_mm must have {len(kernel_size)} numbers, one per axis, got {tuple(spacing_mm)}"
        )
    check_spacing(spacing_mm)


def check_spacing(spacing_mm: Lengths) -> None:
    """Check a voxel size.

    Raises:
        ValueError: spacings that are not positive and finite.
    """
    if any(not 0 < mm < float("inf") for mm in spacing_mm):
        raise ValueError(f"spacing_mm must be positive and finite along every axis, got {tuple(spacing_mm)}")


def tap_positions_mm(kernel_size: Sizes, spacing_mm: Lengths) -> list[Tensor]:
    """The distance of each tap from the kernel's centre, for each axis a tensor of shape kernel_size."""
    axes = []
    for size, mm in zip(kernel_size, spacing_mm, strict=True):
        voxels = torch.arange(size, dtype=torch.float64) - size // 2
        axes.append(voxels * mm)
    return list(torch.meshgrid(*axes, indexing="ij"))


def _gaussian(
    kernel_size: Sizes, spacing_mm: Lengths | None, sigma_mm: float | None
) -> tuple[list[Tensor], Tensor]:
    """Coordinates along each axis longer than 1, in units of sigma, and the Gaussian's exponent there."""
    spacing = spacing_or_isotropic(spacing_mm, kernel_size)
    check_grid(kernel_size, spacing)
    sigma = _DEFAULT_SIGMA * min(spacing) if sigma_mm is None else sigma_mm
    if not sigma > 0:
        raise ValueError(f"sigma_mm must be positive, got {sigma}")
    # in units of sigma, so that the exponent is -|x|^2 / 2
    grids = [grid / sigma for grid in tap_positions_mm(kernel_size, spacing)]
    exponent = -0.5 * torch.stack(grids).square().sum(0)
    coordinates = [grid for grid, size in zip(grids, kernel_size, strict=True) if size > 1]
    return coordinates, exponent


def _directions(coordinates: list[Tensor], kernel_size: Sizes, spacing_mm: Lengths | None) -> list[Tensor]:
    """Position along each line through a voxel and its neighbours, in units of sigma.

    Each line comes once: the two neighbours that it joins have opposite signs.
    """
    spacing = spacing_or_isotropic(spacing_mm, kernel_size)
    long_axes_mm = [mm for mm, size in zip(spacing, kernel_size, strict=True) if size > 1]
    step_mm = torch.tensor(long_axes_mm, dtype=torch.float64)
    positions = []
    for neighbour in product((-1, 0, 1), repeat=len(coordinates)):
        first_step = next((step for step in neighbour if step), 0)
        if first_step <= 0:  # the voxel itself, or the other end of a line
            continue
        # in mm: the diagonal of an anisotropic voxel is not at 45 degrees
        direction = step_mm * torch.tensor(neighbour, dtype=torch.float64)
        direction /= direction.norm()
        along = [cosine * grid for cosine, grid in zip(direction, coordinates, strict=True)]
        positions.append(torch.stack(along).sum(0))
    return positions


def _sampled(factor: Tensor, exponent: Tensor) -> Tensor:
    """factor * exp(exponent), up to a scale: on a coarse axis the Gaussian itself is 0 in floating point."""
    largest = exponent[factor != 0].max()
    return factor * (exponent - largest).clamp(max=0).exp()


def _zero_mean(values: Tensor) -> Tensor:
    """No response to a constant, also when sampled."""
    return values - values.mean()


def _unit(filters: list[Tensor]) -> Tensor:
    normalised = [filter_ / filter_.norm() for filter_ in filters]
    return torch.stack(normalised).float()
