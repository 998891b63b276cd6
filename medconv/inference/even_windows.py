"""Windows as nnU-Net places and weights them: at even distances, the last one at the image's end.

MONAI's, which `sliding_window` takes otherwise, stand at a fixed distance; the last one overlaps more.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Any

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn import functional as F

_SIGMA = 1 / 8  # of the weights, as a share of the window
_PEAK = 10.0


def even_window_inference(
    images: Tensor,
    patch_size: Sequence[int],
    batch_size: int,
    network: Callable[[Tensor], Tensor],
    overlap: float,
    device: torch.device,
) -> Tensor:
    """The weighted mean of the network's outputs over all windows; small images are padded with 0.

    Shape: (images, channels, *spatial) -> (images, outputs, *spatial) on `device`.
    Source: nnU-Net v2's `predict_sliding_window_return_logits`.
    """
    size = images.shape[2:]
    missing = [max(0, window - n) for window, n in zip(patch_size, size, strict=True)]
    before = [n // 2 for n in missing]
    sides = [(first, n - first) for first, n in zip(before, missing, strict=True)]
    padded = F.pad(images, [n for side in reversed(sides) for n in side])
    places = [starts(n, window, overlap) for n, window in zip(padded.shape[2:], patch_size, strict=True)]
    boxes: list[Any] = [
        (..., *(slice(n, n + window) for n, window in zip(corner, patch_size, strict=True)))
        for corner in product(*places)
    ]
    weights = window_weights(tuple(patch_size)).to(device)
    count, total = torch.zeros(padded.shape[2:], device=device), torch.empty(0)
    for box in boxes:
        count[box] += weights
    windows = list(product(range(len(images)), boxes))
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        outputs = network(torch.stack([padded[image][box] for image, box in batch])).float().to(device)
        if not first:
            total = outputs.new_zeros(len(images), outputs.shape[1], *padded.shape[2:])
        for (image, box), output in zip(batch, outputs, strict=True):
            total[image][box] += output * weights
    inside: Any = [slice(first, first + n) for first, n in zip(before, size, strict=True)]
    mean: Tensor = total.div_(count)[(..., *inside)]
    return mean


def starts(n: int, window: int, overlap: float) -> list[int]:
    """Where the windows begin along an axis of n voxels: as few as overlap by that share of a window."""
    steps = ceil((n - window) / (window * (1 - overlap)))
    return [round((n - window) / steps * i) for i in range(steps + 1)] if steps else [0]


@lru_cache(8)
def window_weights(size: tuple[int, ...]) -> Tensor:
    """A Gaussian about the middle voxel, the right one of two, in float16's precision, as nnU-Net's."""
    peak = np.zeros(size)
    peak[tuple(n // 2 for n in size)] = 1
    gaussian = gaussian_filter(peak, [n * _SIGMA for n in size], mode="constant")
    weights = torch.from_numpy(gaussian * (_PEAK / gaussian.max())).half().float()
    return weights.clamp(min=float(weights[weights > 0].min()))
