"""medconv/data/augmentation/intensity.py: against NumPy, SciPy and torch's own interpolation, row by row."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor
from torch.nn import functional as F

from medconv.data.augmentation import intensity, spatial

SHAPE = (5, 20, 17, 14)


def rows(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 2 + 3


def only(value: float, neutral: float, count: int = 5) -> Tensor:
    """For the second row and the last."""
    values = torch.full((count,), neutral)
    values[[1, -1]] = value
    return values


def test_noise_has_the_stated_deviation_and_the_same_in_all_channels() -> None:
    image, std = torch.zeros(3, 2, 40, 50), torch.tensor([0.0, 0.3, 0.7])
    intensity.add_noise(image, std, torch.arange(3))
    for sample, wanted in zip(image, std.tolist(), strict=True):
        for channel in sample:
            assert channel.std().item() == pytest.approx(wanted, rel=0.05) and channel.mean().abs() < 0.06
    first, second = image[2].flatten(1)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.1
    assert abs(torch.corrcoef(torch.stack([image[1].flatten(), image[2].flatten()]))[0, 1]) < 0.1
    again = torch.zeros(3, 2, 40, 50)
    intensity.add_noise(again, std, torch.tensor([5, 1, 2]))
    assert torch.equal(again, image)


def test_blur_is_scipys_gaussian() -> None:
    """Away from the ends, where the weights that fall outside are given to the rest."""
    x, sigma = rows(), torch.tensor([[0.0, 0.0, 0.0], [0.8, 0.5, 1.0], [0, 0, 0], [0, 0, 0], [1.0, 0, 0.7]])
    y = x.clone()
    intensity.soften(y, sigma, torch.ones(5, 3))
    for i in range(5):
        wanted = (
            ndimage.gaussian_filter(x[i].double().numpy(), sigma[i].tolist(), truncate=3)
            if sigma[i].any()
            else x[i].numpy()
        )
        inner = (slice(4, -4),) * 3
        np.testing.assert_allclose(y[i].numpy()[inner], wanted[inner], atol=2e-5)
    flat = torch.full(SHAPE, 7.0)
    intensity.soften(flat, sigma, torch.ones(5, 3))
    torch.testing.assert_close(flat, torch.full(SHAPE, 7.0))


@pytest.mark.parametrize("share", [0.5, 0.73, 0.99, 0.01])
@pytest.mark.parametrize("axes", [2, 3])
def test_low_resolution_is_nearest_down_and_linear_up(share: float, axes: int) -> None:
    x = rows()[:, 0] if axes == 2 else rows()
    y, coarse = x.clone(), only(share, 1.0)[:, None].expand(5, axes)
    intensity.soften(y, torch.zeros(5, axes), coarse)
    size = [max(1, round(n * share)) for n in x.shape[1:]]
    small = F.interpolate(x[:, None].double(), size, mode="nearest-exact")
    wanted = F.interpolate(small, x.shape[1:], mode="bilinear" if axes == 2 else "trilinear")[:, 0].float()
    wanted[[0, 2, 3]] = x[[0, 2, 3]]
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-4)


def test_blur_comes_before_low_resolution() -> None:
    both, apart = rows(), rows()
    sigma, coarse = only(0.9, 0.0)[:, None].expand(5, 3), only(0.6, 1.0)[:, None].expand(5, 3)
    intensity.soften(both, sigma, coarse)
    intensity.soften(apart, sigma, torch.ones(5, 3))
    intensity.soften(apart, torch.zeros(5, 3), coarse)
    torch.testing.assert_close(both, apart, rtol=0, atol=1e-4)


def test_gain_and_offset() -> None:
    x, y = rows(), rows()
    intensity.scale_values(
        y, torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0]), torch.tensor([0.0, -1.0, 3.0, 0.0, 0.0])
    )
    wanted = torch.stack([x[0], x[1] * 2 - 1, x[2] + 3, x[3] * 0.5, x[4]])
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_contrast_is_about_the_mean_and_within_the_range(factor: float) -> None:
    x, y = rows(), rows()
    intensity.stretch(y, only(factor, 1.0))
    for i in (1, 4):
        wanted = ((x[i] - x[i].mean()) * factor + x[i].mean()).clamp(x[i].min(), x[i].max())
        torch.testing.assert_close(y[i], wanted, rtol=0, atol=1e-5)
    assert torch.equal(y[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("exponent", [0.7, 1.5])
def test_gamma_bends_and_keeps_mean_and_deviation(inverted: bool, exponent: float) -> None:
    x, y = rows(), rows()
    intensity.bend(y, only(exponent, 1.0), inverted)
    for i in (1, 4):
        source = -x[i].double() if inverted else x[i].double()
        bent = ((source - source.min()) / (source.max() - source.min())) ** exponent
        wanted = (bent - bent.mean()) / bent.std(correction=0) * source.std(correction=0) + source.mean()
        torch.testing.assert_close(y[i].double(), -wanted if inverted else wanted, rtol=0, atol=1e-4)
    assert torch.equal(y[[0, 2, 3]], x[[0, 2, 3]])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: intensity.bend(x, torch.full((5,), 1.3), False),
        lambda x: intensity.bend(x, torch.full((5,), 1.3), True),
        lambda x: intensity.stretch(x, torch.full((5,), 1.3)),
        lambda x: intensity.soften(x, torch.ones(5, 3), torch.full((5, 3), 0.5)),
    ],
)
def test_a_constant_image_stays_finite(change: Callable[[Tensor], None]) -> None:
    x = torch.full(SHAPE, 2.5)
    change(x)
    torch.testing.assert_close(x, torch.full(SHAPE, 2.5), rtol=0, atol=1e-3)


def test_rows_at_once_are_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an accelerator, on a CPU: chosen rows as one stack, written back."""
    one, stack = rows(), rows()

    def all_of(x: Tensor) -> None:
        intensity.soften(x, only(0.9, 0.0)[:, None].expand(5, 3), only(0.6, 1.0)[:, None].expand(5, 3))
        intensity.scale_values(x, only(1.2, 1.0), only(0.3, 0.0))
        intensity.stretch(x, only(1.2, 1.0))
        intensity.bend(x, only(1.2, 1.0), False)

    all_of(one)
    monkeypatch.setattr(spatial, "one_by_one", lambda device: False)
    all_of(stack)
    torch.testing.assert_close(one, stack, rtol=1e-5, atol=1e-5)
