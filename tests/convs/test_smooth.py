"""medconv/convs/smooth.py: the covariance of taps, kernels drawn from it, and pretrained weights kept."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from medconv.convs import basis, fold_convs, plain, smooth
from medconv.convs.parametrization import only_draws
from medconv.convs.smooth import covariance


def test_the_covariance_follows_its_formula():
    taps = covariance((3, 1), (2.0, 1.0), 1.5, 1.0, 0.5)
    raw = [
        [math.exp(-(x * x + y * y) / 9 - (x - y) ** 2 / 2) + 0.5 * (x == y) for y in (-2, 0, 2)]
        for x in (-2, 0, 2)
    ]
    scale = 3 / sum(raw[i][i] for i in range(3))
    torch.testing.assert_close(taps, torch.tensor(raw, dtype=torch.float64) * scale)


@pytest.mark.parametrize("throughout", [False, True])
def test_new_weights_have_the_prior_s_covariance_and_the_layer_s_variance(throughout):
    torch.manual_seed(0)
    conv = nn.Conv2d(256, 256, 3)
    before = conv.weight.detach().square().mean()
    weight = smooth(conv, floor=0.1, throughout=throughout).weight.detach()
    assert weight.square().mean() == pytest.approx(float(before), rel=0.02)
    taps = weight.flatten(2).flatten(0, 1)
    seen = taps.T @ taps / len(taps) / weight.square().mean()
    torch.testing.assert_close(seen, covariance((3, 3), (1, 1), 2.0, 0.8, 0.1).float(), atol=0.03, rtol=0.03)


def test_a_layer_with_new_weights_is_the_same_plain_layer():
    conv = nn.Conv3d(4, 6, 3, groups=2, dtype=torch.float64).to(memory_format=torch.channels_last_3d)
    parameter = conv.weight
    made = smooth(conv)
    assert made is conv and type(conv) is nn.Conv3d and conv.weight is parameter and conv.weight.requires_grad
    assert conv.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_weights_that_start_at_zero_stay_there():
    """As those of a residual branch that is to begin as nothing."""
    conv = nn.Conv2d(2, 2, 3)
    nn.init.zeros_(conv.weight)
    assert not smooth(conv).weight.any()


def test_pretrained_weights_are_kept_and_folded():
    conv = nn.Conv3d(4, 6, 3, padding=1)
    image, before = torch.randn(1, 4, 6, 6, 6), conv.weight.detach().clone()
    made = smooth(conv, spacing_mm=(1.0, 1.0, 3.0), throughout=True, init_from_weights=True)
    torch.testing.assert_close(made.weight, before)
    assert made.approximation_error < 1e-5
    network = nn.Sequential(made)
    expected = network(image)
    folded = fold_convs(network)
    assert type(folded[0]) is nn.Conv3d
    torch.testing.assert_close(folded(image), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extent_mm": 0.0}, r"extent_mm must be positive and finite, got 0\.0"),
        ({"length_mm": -1.0}, r"length_mm must be positive and finite, got -1\.0"),
        ({"floor": 0.0}, r"floor must be positive and finite, got 0\.0"),
        ({"floor": math.inf}, "floor must be positive and finite, got inf"),
        ({"scale": 0.0}, r"scale must be positive and finite, got 0\.0"),
        ({"init_from_weights": True}, "init_from_weights=true keeps the weights: .* only throughout=true"),
        ({"spacing_mm": (1.0, 0.0)}, "spacing_mm must be positive"),
        ({"spacing_mm": (1.0, math.inf)}, "spacing_mm must be positive and finite"),
        ({"spacing_mm": (1.0,)}, "spacing_mm must have 2 numbers"),
    ],
)
def test_values_out_of_range_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        smooth(nn.Conv2d(2, 2, 3), **arguments)


@pytest.mark.parametrize("name", ["extent_mm", "length_mm", "floor"])
@pytest.mark.parametrize("value", [1e-200, 1e200])
def test_extreme_values_give_finite_kernels(name, value):
    assert smooth(nn.Conv2d(2, 2, 3), **{name: value}).weight.isfinite().all()


def test_an_even_kernel_is_an_error():
    with pytest.raises(ValueError, match=r"kernel_size must be odd.*\(4, 4\)"):
        smooth(nn.Conv2d(2, 2, 4))


def test_only_new_weights_are_drawn_unless_the_prior_holds_throughout():
    assert only_draws(smooth)
    assert only_draws(partial(smooth, floor=0.1))
    assert only_draws(plain)
    assert not only_draws(partial(smooth, throughout=True))
    assert not only_draws(basis)
