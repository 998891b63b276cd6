"""medconv/data/augmentation/intensity.py: compared row by row with NumPy, SciPy and torch."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.nn import functional as F

from medconv.data.augmentation import intensity, spatial

SHAPE = (5, 20, 17, 14)


def rows(seed=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 2 + 3


def scale(rows, gain, offset):
    intensity.change(rows, (gain != 1) | (offset != 0), intensity.scale_, gain, offset)


def stretch(rows, contrast):
    intensity.change(rows, contrast != 1, intensity.stretch_, contrast)


def bend(rows, gamma, inverted):
    intensity.change(rows, gamma != 1, partial(intensity.bend_, inverted=inverted), gamma)


def only(value, neutral, count=5):
    """The value for the second and the last row, `neutral` for the others."""
    values = torch.full((count,), neutral)
    values[[1, -1]] = value
    return values


def test_noise_has_its_deviation_in_every_channel_and_follows_the_seeds():
    image, std = torch.zeros(3, 2, 40, 50), torch.tensor([0.0, 0.3, 0.7])
    intensity.add_noise(image, std, torch.arange(3))
    for sample, deviation in zip(image, std.tolist(), strict=True):
        for channel in sample:
            assert channel.std().item() == pytest.approx(deviation, rel=0.05) and channel.mean().abs() < 0.06
    first, second = image[2].flatten(1)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.1
    assert abs(torch.corrcoef(torch.stack([image[1].flatten(), image[2].flatten()]))[0, 1]) < 0.1
    again = torch.zeros(3, 2, 40, 50)
    intensity.add_noise(again, std, torch.tensor([5, 1, 2]))
    assert torch.equal(again, image)


def test_blur_equals_the_gaussian_of_scipy():
    """Except near the borders, where only the weights inside the image are used."""
    x, sigma = rows(), torch.tensor([[0.0, 0.0, 0.0], [0.8, 0.5, 1.0], [0, 0, 0], [0, 0, 0], [1.0, 0, 0.7]])
    y = x.clone()
    intensity.soften(y, sigma, torch.ones(5, 3))
    for i in range(5):
        expected = x[i].double().numpy()
        if sigma[i].any():
            expected = ndimage.gaussian_filter(expected, sigma[i].tolist(), truncate=3)
        inner = (slice(4, -4),) * 3
        np.testing.assert_allclose(y[i].numpy()[inner], expected[inner], atol=2e-5)
    flat = torch.full(SHAPE, 7.0)
    intensity.soften(flat, sigma, torch.ones(5, 3))
    torch.testing.assert_close(flat, torch.full(SHAPE, 7.0))


@pytest.mark.parametrize("share", [0.5, 0.73, 0.99, 0.01])
@pytest.mark.parametrize("axes", [2, 3])
def test_low_resolution_samples_down_nearest_and_up_linearly(share, axes):
    x = rows()[:, 0] if axes == 2 else rows()
    y, coarse = x.clone(), only(share, 1.0)[:, None].expand(5, axes)
    intensity.soften(y, torch.zeros(5, axes), coarse)
    size = [max(1, round(n * share)) for n in x.shape[1:]]
    small = F.interpolate(x[:, None].double(), size, mode="nearest-exact")
    expected = F.interpolate(small, x.shape[1:], mode="bilinear" if axes == 2 else "trilinear")[:, 0].float()
    expected[[0, 2, 3]] = x[[0, 2, 3]]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)


def test_blur_comes_before_low_resolution():
    both, apart = rows(), rows()
    sigma, coarse = only(0.9, 0.0)[:, None].expand(5, 3), only(0.6, 1.0)[:, None].expand(5, 3)
    intensity.soften(both, sigma, coarse)
    intensity.soften(apart, sigma, torch.ones(5, 3))
    intensity.soften(apart, torch.zeros(5, 3), coarse)
    torch.testing.assert_close(both, apart, rtol=0, atol=1e-4)


def test_values_are_scaled_and_shifted():
    x, y = rows(), rows()
    gain, offset = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]), torch.tensor([0.0, -1.0, 3.0, 0.0, 0.0])
    scale(y, gain, offset)
    expected = torch.stack([x[0], x[1] * 2 - 1, x[2] + 3, x[3] * 0.5, x[4]])
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_contrast_scales_about_the_mean_and_keeps_the_range(factor):
    x, y = rows(), rows()
    stretch(y, only(factor, 1.0))
    for i in (1, 4):
        expected = ((x[i] - x[i].mean()) * factor + x[i].mean()).clamp(x[i].min(), x[i].max())
        torch.testing.assert_close(y[i], expected, rtol=0, atol=1e-5)
    assert torch.equal(y[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("exponent", [0.7, 1.5])
def test_gamma_keeps_mean_and_deviation(inverted, exponent):
    x, y = rows(), rows()
    bend(y, only(exponent, 1.0), inverted)
    for i in (1, 4):
        source = -x[i].double() if inverted else x[i].double()
        bent = ((source - source.min()) / (source.max() - source.min())) ** exponent
        expected = (bent - bent.mean()) / bent.std(correction=0) * source.std(correction=0) + source.mean()
        torch.testing.assert_close(y[i].double(), -expected if inverted else expected, rtol=0, atol=1e-4)
    assert torch.equal(y[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: bend(x, torch.full((5,), 1.3), False),
        lambda x: bend(x, torch.full((5,), 1.3), True),
        lambda x: stretch(x, torch.full((5,), 1.3)),
        lambda x: intensity.soften(x, torch.ones(5, 3), torch.full((5, 3), 0.5)),
    ],
)
def test_a_constant_image_stays_finite(change):
    x = torch.full(SHAPE, 2.5)
    change(x)
    torch.testing.assert_close(x, torch.full(SHAPE, 2.5), rtol=0, atol=1e-3)


def test_all_rows_at_once_give_the_same_as_one_by_one(monkeypatch):
    """The chosen rows as one stack, as on an accelerator, but here on a CPU."""
    one_by_one, stack = rows(), rows()

    def change(x):
        intensity.soften(x, only(0.9, 0.0)[:, None].expand(5, 3), only(0.6, 1.0)[:, None].expand(5, 3))
        scale(x, only(1.2, 1.0), only(0.3, 0.0))
        stretch(x, only(1.2, 1.0))
        bend(x, only(1.2, 1.0), False)

    change(one_by_one)
    monkeypatch.setattr(spatial, "ONE_BY_ONE", ())
    change(stack)
    torch.testing.assert_close(one_by_one, stack, rtol=1e-5, atol=1e-5)
