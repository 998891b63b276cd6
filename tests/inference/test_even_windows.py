"""medconv/inference/even_windows.py: nnU-Net's places and weights of windows, compared with slow loops."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from medconv.inference.even_windows import even_window_inference, starts, window_weights


@pytest.mark.parametrize(
    ("n", "window", "overlap", "expected"),
    [
        (110, 64, 0.5, [0, 23, 46]),  # nnU-Net's own example
        (64, 64, 0.5, [0]),
        (65, 64, 0.5, [0, 1]),
        (100, 40, 0.5, [0, 20, 40, 60]),
        (100, 40, 0.0, [0, 30, 60]),
        (17, 10, 0.5, [0, 4, 7]),  # halves are rounded to even numbers
    ],
)
def test_windows_stand_at_even_distances(n: int, window: int, overlap: float, expected: list[int]) -> None:
    assert starts(n, window, overlap) == expected


def test_weights_are_a_gaussian_about_the_voxel_right_of_the_middle() -> None:
    weights = window_weights((8, 16)).numpy()
    assert np.unravel_index(weights.argmax(), weights.shape) == (4, 8)
    assert weights[4, 10] / weights[4, 8] == pytest.approx(np.exp(-0.5), abs=2e-3)  # at one sigma
    assert weights.max() == 10 and weights.min() > 0
    np.testing.assert_array_equal(weights, weights.astype(np.float16))


@pytest.mark.parametrize("size", [(13, 9), (5, 20), (8, 6)])
def test_the_result_is_the_weighted_mean_of_all_windows(size: tuple[int, int]) -> None:
    """Small images are padded with 0 on both sides, the odd voxel behind."""
    images, patch = torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0)), (8, 6)

    def network(windows: Tensor) -> Tensor:  # depends on where a voxel is in its window
        return torch.cat([windows.cumsum(2), windows * windows.mean((2, 3), keepdim=True)], 1)

    before = [max(0, p - n) // 2 for p, n in zip(patch, size, strict=True)]
    large = [max(p, n) for p, n in zip(patch, size, strict=True)]
    padded = torch.zeros(2, 1, *large)
    inside = tuple(slice(b, b + n) for b, n in zip(before, size, strict=True))
    padded[(..., *inside)] = images
    total, count = torch.zeros(2, 2, *large), torch.zeros(large)
    for corner in product(*(starts(n, p, 0.5) for n, p in zip(large, patch, strict=True))):
        box = (..., *(slice(c, c + p) for c, p in zip(corner, patch, strict=True)))
        total[box] += network(padded[box]) * window_weights(patch)
        count[box] += window_weights(patch)
    result = even_window_inference(images, patch, 3, network, 0.5, torch.device("cpu"))
    torch.testing.assert_close(result, (total / count)[(..., *inside)], atol=1e-5, rtol=1e-4)
