"""Where sliding windows stand along an axis, and how their voxels are weighted: as in MONAI or in nnU-Net."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import torch
from monai.data.utils import compute_importance_map
from scipy.ndimage import gaussian_filter
from torch import Tensor

# Of the Gaussian weights, as a share of the window.
_SIGMA = 1 / 8
# The largest weight of nnU-Net's Gaussian.
_PEAK = 10.0


@dataclass(frozen=True)
class WindowPlacement:
    """How windows are placed and weighted.

    Args:
        description: as an exported model states it.
        starts: (axis length, window size, overlap) -> first voxels of the windows, in voxels.
        weights: (window size of each axis, device) -> weights, (*window size) float32.
        sums_in_fp32: whether outputs are converted to float32 before they are weighted.
    """

    description: str
    starts: Callable[[int, int, float], list[int]]
    weights: Callable[[Sequence[int], torch.device], Tensor]
    sums_in_fp32: bool


def fixed_starts(length: int, window: int, overlap: float) -> list[int]:
    """First voxels of windows at a fixed distance; the last one ends with the axis and overlaps more.

    Args:
        length: of the axis, in voxels; at least `window`.
        overlap: share of a window, from 0 to below 1.
    Source: MONAI's `dense_patch_slices`.
    """
    distance = max(1, int(window * (1 - overlap)))
    steps = ceil((length - window) / distance)
    # The last window would end behind the axis.
    return [min(step * distance, length - window) for step in range(steps + 1)]


def even_starts(length: int, window: int, overlap: float) -> list[int]:
    """First voxels of windows at even distances: as few windows as overlap by at least that share.

    Args:
        length: of the axis, in voxels; at least `window`.
        overlap: share of a window, from 0 to below 1.
    Source: nnU-Net v2's `compute_steps_for_sliding_window`.
    """
    steps = ceil((length - window) / (window * (1 - overlap)))
    if steps == 0:
        return [0]
    distance = (length - window) / steps
    # Halves are rounded to even numbers, as by NumPy.
    return [round(distance * step) for step in range(steps + 1)]


def monai_weights(window_size: Sequence[int], device: torch.device) -> Tensor:
    """A Gaussian about the middle of the window, at least 0.001. Shape: (*window_size) float32."""
    return compute_importance_map(tuple(window_size), mode="gaussian", sigma_scale=_SIGMA, device=device)


def nnunet_weights(window_size: Sequence[int], device: torch.device) -> Tensor:
    """A Gaussian about the middle voxel, the right one of two, in float16's precision.

    Shape: (*window_size) float32.
    Source: nnU-Net v2's `compute_gaussian`.
    """
    return _nnunet_weights(tuple(window_size)).to(device)


@lru_cache(8)
def _nnunet_weights(window_size: tuple[int, ...]) -> Tensor:
    middle = tuple(size // 2 for size in window_size)
    peak = np.zeros(window_size)
    peak[middle] = 1
    sigmas = [size * _SIGMA for size in window_size]
    gaussian = gaussian_filter(peak, sigmas, mode="constant")
    scaled = gaussian * (_PEAK / gaussian.max())
    weights = torch.from_numpy(scaled).half().float()
    # float16 rounds the corners of large windows to 0, and a sum of weights must not be 0.
    smallest = weights[weights > 0].min()
    return weights.clamp(min=float(smallest))


FIXED_DISTANCE = WindowPlacement(
    description="gaussian", starts=fixed_starts, weights=monai_weights, sums_in_fp32=False
)
EVEN_DISTANCE = WindowPlacement(
    description="gaussian, windows at even distances as nnU-Net's",
    starts=even_starts,
    weights=nnunet_weights,
    sums_in_fp32=True,
)
