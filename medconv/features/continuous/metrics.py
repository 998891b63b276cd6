"""How near an image is to its reference: PSNR, SSIM and the mean absolute error."""

from collections.abc import Collection
from math import prod

import numpy as np
import torch
from monai.metrics.regression import compute_ssim_and_cs
from torch import Tensor

from medconv.metrics.dice import mean

METRICS = {"psnr": "PSNR (dB)", "ssim": "SSIM", "mae": "mean absolute error"}  # with their words
Row = dict[str, float | None]  # metric to its value; None: undefined
_WINDOW = 11  # voxels, and
_SIGMA = 1.5  # as of Wang et al.
_SMALLEST = 1e-7  # error over the range of the reference; more is beyond float32
_VOXELS_AT_ONCE = 2**22


def measure(image: np.ndarray, reference: np.ndarray) -> Row:
    """Each metric over all voxels. The range of PSNR and SSIM is that of the reference, lowest to highest.

    Shape: (X, Y, Z) twice; Z = 1 if they are 2D.
    Source: Wang et al. 2004, doi:10.1109/TIP.2003.819861, of a volume with windows in 3D.
    """
    difference = image.astype(np.float64) - reference
    mae = float(np.abs(difference).mean())
    data_range = float(reference.max()) - float(reference.min())
    if not data_range or not np.isfinite(mae):
        return {"psnr": None, "ssim": None, "mae": mae if np.isfinite(mae) else None}
    error = max(float(np.sqrt(np.square(difference).mean())), _SMALLEST * data_range)
    return {"psnr": 20 * float(np.log10(data_range / error)), "ssim": _ssim(image, reference), "mae": mae}


def _ssim(image: np.ndarray, reference: np.ndarray) -> float:
    """The mean over all windows, some planes at a time."""
    low = float(reference.min())
    data_range = float(reference.max()) - low
    # from 0 to 1, else float32 rounds what small differences have beside a large mean
    pair = [torch.from_numpy((each - low) / data_range).float()[None, None] for each in (image, reference)]
    if image.shape[2] == 1:
        pair = [each[..., 0] for each in pair]
    planes = max(1, _VOXELS_AT_ONCE // prod(pair[0].shape[3:]))
    depth = _window(pair[0])[0]
    total = 0.0
    count = 0
    for first in range(0, pair[0].shape[2] - depth + 1, planes):
        slab = slice(first, first + planes + depth - 1)
        windows = ssim_of_windows(pair[0][:, :, slab], pair[1][:, :, slab], 1.0)
        total += float(windows.sum(dtype=torch.float64))
        count += windows.numel()
    return total / count


def _window(image: Tensor) -> tuple[int, ...]:
    """The odd number of voxels along each axis, smaller where the image is."""
    return tuple(min(_WINDOW, size - 1 + size % 2) for size in image.shape[2:])


def ssim_of_windows(image: Tensor, reference: Tensor, data_range: float | Tensor) -> Tensor:
    """SSIM of each window within the image. Shape: (batch, channels, *spatial) twice -> fewer voxels."""
    size = _window(image)
    sigma = [_SIGMA] * len(size)
    # half precision, as of a validation, would round the differences of squares
    with torch.autocast(image.device.type, enabled=False):
        ssim, structure = compute_ssim_and_cs(image, reference, len(size), size, sigma, data_range)  # type: ignore[arg-type]
    # of an inverted image below 0, both factors are negative, but not the likeness
    return torch.where(structure < 0, -ssim.abs(), ssim)


def means(rows: Collection[Row]) -> Row:
    """The mean of each metric over the cases that have it."""
    return {name: mean(row[name] for row in rows) for name in METRICS}
