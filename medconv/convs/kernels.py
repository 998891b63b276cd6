"""Fixed filter banks, sampled in mm on a layer's voxel grid.

The banks are what the weight-space priors of this package combine; they are constants, never learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def gaussian_jet(
    kernel_size: Sequence[int], spacing_mm: Sequence[float] | None = None, sigma_mm: float | None = None
) -> Tensor:
    """Gaussian and its first and second derivatives: blob, edges along each axis, lines and corners (Hessian).

    Shape: (filters, *kernel_size), float32; 1 + N + N(N+1)/2 filters in N dimensions, so 6 in 2D and 10 in 3D,
    each of unit Euclidean norm. An axis of length 1 has no derivative: the filters along it are left out.
    Args:
        kernel_size: odd, in voxels, one number per axis.
        spacing_mm: voxel size per axis; None is 1 mm along every axis.
        sigma_mm: width of the Gaussian; None takes 0.7 of the finest spacing, which a 3-kernel can hold.
    Raises: ValueError: an even kernel axis, or a spacing or sigma that is not positive.
    Source: Jacobsen et al. 2016, arXiv:1605.02971.
    """
    spacing = tuple(spacing_mm) if spacing_mm is not None else (1.0,) * len(kernel_size)
    sigma = 0.7 * min(spacing) if sigma_mm is None else sigma_mm
    _check(kernel_size, spacing, sigma)
    axes = [(torch.arange(k, dtype=torch.float64) - k // 2) * s / sigma for k, s in zip(kernel_size, spacing, strict=True)]
    grids = torch.meshgrid(*axes, indexing="ij")
    exponent = -0.5 * torch.stack(grids).square().sum(0)
    wide = [grid for grid, k in zip(grids, kernel_size, strict=True) if k > 1]
    filters = [exponent.exp(), *(_sampled(-grid, exponent) for grid in wide)]
    for a, b in combinations_with_replacement(range(len(wide)), 2):
        second = _sampled(wide[a] * wide[b] - float(a == b), exponent)
        filters.append(second - second.mean())  # no response to a constant, also when sampled
    return torch.stack([f / f.norm() for f in filters]).float()


def _sampled(factor: Tensor, exponent: Tensor) -> Tensor:
    """factor * exp(exponent), up to a scale: on a coarse axis the Gaussian itself is 0 in floating point."""
    return factor * (exponent - exponent[factor != 0].max()).clamp(max=0).exp()


def _check(kernel_size: Sequence[int], spacing: Sequence[float], sigma: float) -> None:
    if any(k % 2 == 0 for k in kernel_size):
        raise ValueError(f"kernel_size must be odd along every axis for a sampled filter bank, got {tuple(kernel_size)}")
    if len(spacing) != len(kernel_size):
        raise ValueError(f"spacing_mm must have {len(kernel_size)} numbers, one per axis, got {tuple(spacing)}")
    if any(not s > 0 for s in (*spacing, sigma)):
        raise ValueError(f"spacing_mm and sigma_mm must be positive, got {tuple(spacing)} and {sigma}")
