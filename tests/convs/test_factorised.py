"""medconv/convs/factorised.py: fewer operations, what they amount to, and starting from dense weights."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from reference.convolution import convolve
from torch import nn

from medconv.convs import basis, bottleneck, se, separable


def test_bottleneck_is_three_convolutions_after_one_another():
    module = bottleneck(nn.Conv2d(3, 5, 3, stride=2, padding=1), channels=(2, 4))
    assert [tuple(part.weight.shape) for part in module] == [(2, 3, 1, 1), (4, 2, 3, 3), (5, 4, 1, 1)]
    image = torch.randn(2, 3, 6, 5)
    x = image.double().numpy()
    for part in module:
        x = convolve(x, part.weight.detach().double().numpy(), part.stride, part.padding, part.dilation)
    x += module[2].bias.detach().double().numpy()[:, None, None]
    np.testing.assert_allclose(module(image).detach().numpy(), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "channels"),
    [({}, (4, 8)), ({"ratio": 1.0}, (16, 32)), ({"ratio": 0.01}, (1, 1)), ({"channels": 3}, (3, 3))],
)
def test_bottleneck_channels(arguments, channels):
    down, core, up = bottleneck(nn.Conv3d(16, 32, 3), **arguments)
    assert (core.in_channels, core.out_channels) == channels == (down.out_channels, up.in_channels)


def test_separable_is_depthwise_then_pointwise():
    module = separable(nn.Conv2d(3, 5, 3, padding=1), depth_multiplier=2)
    depth, point = module
    assert (depth.groups, tuple(depth.weight.shape), tuple(point.weight.shape)) == (
        3,
        (6, 1, 3, 3),
        (5, 6, 1, 1),
    )
    image = torch.randn(1, 3, 4, 4)
    x = convolve(
        image.double().numpy(), depth.weight.detach().double().numpy(), (1, 1), (1, 1), (1, 1), groups=3
    )
    x = convolve(x, point.weight.detach().double().numpy(), (1, 1), (0, 0), (1, 1))
    x += point.bias.detach().double().numpy()[:, None, None]
    np.testing.assert_allclose(module(image).detach().numpy(), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        partial(bottleneck, ratio=1.0, init_from_weights=True),
        partial(separable, depth_multiplier=9, init_from_weights=True),
    ],
)
def test_at_full_rank_the_decomposition_is_exact(make):
    plain, x = nn.Conv2d(5, 4, 3, padding=1), torch.randn(2, 5, 6, 6)
    expected = plain(x)
    module = make(plain)
    assert module.approximation_error < 1e-6
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "steps"), [(lambda c, r: bottleneck(c, channels=r, init_from_weights=True), (1, 3, 6, 8)),
                                             (lambda c, r: separable(c, depth_multiplier=r, init_from_weights=True), (1, 2, 4, 8))])  # fmt: skip
def test_the_approximation_error_falls_with_the_rank(make, steps):
    plain = nn.Conv3d(8, 8, 3)
    errors = [make(deepcopy(plain), rank).approximation_error for rank in steps]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1] + 0.1


def test_separable_keeps_the_best_filter_of_every_input():
    """With one filter per input the error is what the singular values beyond the first leave."""
    plain = nn.Conv2d(3, 6, 3)
    weight = plain.weight.detach().double().numpy()
    lost = sum((np.linalg.svd(weight[:, i].reshape(6, 9), compute_uv=False)[1:] ** 2).sum() for i in range(3))
    assert separable(plain, init_from_weights=True).approximation_error == pytest.approx(
        (lost / (weight**2).sum()) ** 0.5, rel=1e-4
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bottleneck(nn.Conv2d(4, 4, 3, groups=2)), r"conv=bottleneck needs groups=1, got 2"),
        (lambda: bottleneck(nn.Conv2d(4, 4, 3), ratio=0.0), r"ratio must lie in \(0, 1\], got 0\.0"),
        (lambda: bottleneck(nn.Conv2d(4, 4, 3), ratio=1.5), r"ratio must lie in \(0, 1\], got 1\.5"),
        (
            lambda: bottleneck(nn.Conv2d(4, 4, 3), channels=(2, 0)),
            r"channels must be at least 1, got \(2, 0\)",
        ),
        (lambda: separable(nn.Conv2d(4, 4, 3, groups=4)), r"conv=separable needs groups=1, got 4"),
        (
            lambda: separable(nn.Conv2d(4, 4, 3), depth_multiplier=0),
            r"depth_multiplier must be at least 1, got 0",
        ),
        (lambda: se(nn.Conv2d(4, 4, 3), reduction=0), r"reduction must be at least 1, got 0"),
        (lambda: bottleneck(basis(nn.Conv2d(4, 4, 3))), r"parametrized weight already"),
    ],
)
def test_errors_name_the_argument_and_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("ratio", "channels"), [(0.25, (2, 4)), (0.1, (1, 2))])
def test_the_channels_between_are_the_nearest_to_their_share(ratio, channels):
    """Of 6 and 16; at least one."""
    first, spatial, last = bottleneck(nn.Conv2d(6, 16, 3, padding=1), ratio=ratio)
    assert (first.out_channels, spatial.out_channels) == channels
    assert (spatial.in_channels, last.in_channels) == channels
