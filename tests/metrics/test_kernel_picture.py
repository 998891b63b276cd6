"""medconv/metrics/kernel_picture.py: colours, scale and layout."""

import numpy as np

from medconv.metrics.kernel_picture import kernel_picture


def test_positive_is_red_negative_blue_and_zero_white() -> None:
    weight = np.zeros((1, 1, 3, 3))
    weight[0, 0, 0, 0] = 2.0
    weight[0, 0, 2, 2] = -2.0
    picture = kernel_picture(weight).astype(int)
    tap = 16  # pixels; a frame of 1 is around all taps
    assert picture[1 + tap // 2, 1 + tap // 2].tolist() == [178, 24, 43]
    assert picture[1 + 5 * tap // 2, 1 + 5 * tap // 2].tolist() == [33, 102, 172]
    assert picture[1 + 3 * tap // 2, 1 + 3 * tap // 2].tolist() == [255, 255, 255]


def test_kernels_share_a_scale_and_a_dead_layer_is_white() -> None:
    weight = np.ones((2, 1, 3, 3))
    weight[1] /= 10
    picture = kernel_picture(weight).astype(int)
    half = picture.shape[0] // 2
    assert picture[10, 10].tolist() == [178, 24, 43] and min(picture[half + 10, 10]) > 230
    assert kernel_picture(np.zeros((1, 1, 3, 3)))[10, 10].tolist() == [255, 255, 255]


def test_four_channels_evenly_spaced_and_the_slices_of_volumes_side_by_side() -> None:
    flat = kernel_picture(np.ones((64, 32, 3, 3)))
    assert flat.shape == (4 * 58, 4 * 58, 3) and flat.dtype == np.uint8
    volume = kernel_picture(np.ones((2, 1, 3, 3, 5)))
    assert volume.shape == (2 * 58, 5 * 50 + 8, 3)
    weight = np.zeros((64, 1, 3, 3))
    weight[-1] = 1.0  # the last channel is always shown
    assert kernel_picture(weight)[-20, 20].tolist() == [178, 24, 43]
