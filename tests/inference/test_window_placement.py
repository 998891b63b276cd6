"""Where windows stand and how they are weighted, compared with MONAI and with slow loops of nnU-Net's rules."""

from itertools import product

import numpy as np
import pytest
import torch
from monai.data.utils import dense_patch_slices
from monai.inferers import sliding_window_inference

from medconv.inference.sliding_window import (
    EVEN_DISTANCE,
    SlidingWindow,
    even_starts,
    fixed_starts,
    monai_weights,
    nnunet_weights,
)

CPU = torch.device("cpu")
PLACES = torch.arange(48.0).reshape(8, 6)  # of voxels in a window


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
def test_windows_stand_at_even_distances(n, window, overlap, expected):
    assert even_starts(n, window, overlap) == expected


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
@pytest.mark.parametrize(("length", "window"), [(8, 8), (9, 8), (23, 8), (16, 8), (5, 1), (100, 33)])
def test_windows_at_a_fixed_distance_stand_where_monai_has_them(length, window, overlap):
    distance = max(1, int(window * (1 - overlap))) if length != window else window
    slices = dense_patch_slices((length,), (window,), (distance,))
    assert fixed_starts(length, window, overlap) == [one.start for (one,) in slices]


def test_the_blended_logits_are_those_of_monai_bit_for_bit():
    """Also of bfloat16 outputs, which are weighted in their own precision, and of images that are padded."""
    images = torch.randn(2, 1, 13, 4, generator=torch.Generator().manual_seed(0))

    def network(windows):
        return torch.cat([windows * PLACES, windows.sin()], 1).bfloat16()

    blended = SlidingWindow((8, 6), 0.4, batch_size=3)(network, images)
    expected = sliding_window_inference(images, (8, 6), 3, network, overlap=0.4, mode="gaussian")
    assert blended.dtype == torch.float32
    assert torch.equal(blended, expected)
    assert monai_weights((8, 6), CPU).min() >= 1e-3


def test_weights_are_a_gaussian_about_the_voxel_right_of_the_middle():
    weights = nnunet_weights((8, 16), CPU).numpy()
    assert np.unravel_index(weights.argmax(), weights.shape) == (4, 8)
    assert weights[4, 10] / weights[4, 8] == pytest.approx(np.exp(-0.5), abs=2e-3)  # at one sigma
    assert weights.max() == 10 and weights.min() > 0
    np.testing.assert_array_equal(weights, weights.astype(np.float16))


@pytest.mark.parametrize("size", [(13, 9), (5, 20), (8, 6)])
def test_the_result_is_the_weighted_mean_of_all_windows(size):
    """Small images are padded with 0 on both sides, the odd voxel behind."""
    images, patch = torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0)), (8, 6)

    def network(windows):
        return torch.cat([windows * PLACES, windows * windows.mean((2, 3), keepdim=True)], 1)

    before = [max(0, p - n) // 2 for p, n in zip(patch, size, strict=True)]
    large = [max(p, n) for p, n in zip(patch, size, strict=True)]
    padded = torch.zeros(2, 1, *large)
    inside = tuple(slice(b, b + n) for b, n in zip(before, size, strict=True))
    padded[(..., *inside)] = images
    total, count = torch.zeros(2, 2, *large), torch.zeros(large)
    for corner in product(*(even_starts(n, p, 0.5) for n, p in zip(large, patch, strict=True))):
        box = (..., *(slice(c, c + p) for c, p in zip(corner, patch, strict=True)))
        total[box] += network(padded[box]) * nnunet_weights(patch, CPU)
        count[box] += nnunet_weights(patch, CPU)
    result = SlidingWindow(patch, 0.5, 3, placement=EVEN_DISTANCE)(network, images)
    torch.testing.assert_close(result, (total / count)[(..., *inside)], atol=1e-5, rtol=1e-4)
