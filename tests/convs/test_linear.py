"""medconv/convs/linear.py: the kernels of `basis`, `ball` and `spacing`, tap by tap in plain loops."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from medconv.convs import acs, ball, basis, filter_bank, spacing, transform


def coefficients(conv):
    """(out, in, coefficients), float64."""
    return conv.parametrizations.weight.original.detach().double().numpy().transpose(0, 2, 1)


def taps(kernel_size):
    return list(product(*map(range, kernel_size)))


@pytest.mark.parametrize(
    ("conv", "arguments", "filters"),
    [
        (nn.Conv2d(2, 3, 3), {}, 6),
        (nn.Conv3d(2, 3, (1, 3, 5)), {"spacing_mm": (5.0, 1.0, 0.5), "sigma_mm": 0.9}, 6),
        (nn.Conv3d(2, 2, 3), {"bank": ["laplacian", "lines"]}, 17),  # both begin with the same Gaussian
        (nn.Conv2d(2, 2, 3), {"bank": torch.randn(3, 3, 3)}, 3),
        (nn.Conv2d(4, 4, 5, groups=2), {"bank": "gabor", "spacing_mm": (1.0, 2.0)}, 9),
    ],
    ids=["2d", "flat 3d", "two banks", "own bank", "grouped"],
)
def test_basis_kernels_are_sums_of_the_filters(conv, arguments, filters):
    bank = arguments.get("bank", "jet")
    if not isinstance(bank, torch.Tensor):
        bank = filter_bank(bank, conv.kernel_size, arguments.get("spacing_mm"), arguments.get("sigma_mm"))
    basis(conv, **arguments)
    learned, bank = coefficients(conv), bank.double().numpy()
    assert learned.shape[2] == len(bank) == filters
    expected = np.zeros(conv.weight.shape)
    for o, i, f in product(*map(range, learned.shape)):
        expected[o, i] += learned[o, i, f] * bank[f]
    np.testing.assert_allclose(conv.weight.detach().numpy(), expected, atol=1e-5)
    assert all(buffer.is_contiguous() for buffer in conv.buffers())  # NCCL sends no others


def test_arguments_in_mm_are_scaled_with_the_voxels_of_a_layer():
    conv = lambda: nn.Conv2d(2, 2, 3, padding=1)  # noqa: E731
    deep, fine = {"spacing_mm": (4.0, 4.0), "scale": 4.0}, {"spacing_mm": (1.0, 1.0)}
    for make, key in ((transform, "sigma_mm"), (basis, "sigma_mm")):
        a, b = (
            make(conv(), **{key: 1.3}, **grid).parametrizations.weight[0].state_dict()
            for grid in (deep, fine)
        )
        assert all(torch.allclose(a[k], b[k]) for k in a)
    for make, key in ((ball, "radius_mm"), (spacing, "reference_mm")):
        shapes = {
            tuple(make(conv(), **{key: 2.0}, **grid).parametrizations.weight[0].mixtures.shape)
            for grid in (deep, fine)
        }
        assert len(shapes) == 1


@pytest.mark.parametrize(
    ("conv", "spacing_mm", "radius_mm", "inside"),
    [
        (nn.Conv3d(2, 3, 3), None, None, 19),
        (nn.Conv3d(2, 3, 3), None, 1.0, 7),
        (nn.Conv3d(2, 3, 5), (1.0, 1.0, 1.0), 2.5, 81),
        (nn.Conv3d(2, 3, 3), (0.5, 0.5, 7.5), None, 9),
        (nn.Conv3d(2, 3, 3), (0.5, 0.5, 7.5), 8.0, 27),
        (nn.Conv2d(2, 3, (3, 5)), (2.0, 1.0), 2.0, 7),
        (nn.Conv2d(2, 3, 3), None, 0.1, 1),
    ],
)
def test_ball_has_the_taps_within_its_radius_and_no_others(conv, spacing_mm, radius_mm, inside):
    size = conv.kernel_size
    ball(conv, spacing_mm=spacing_mm, radius_mm=radius_mm)
    places = spacing_mm or (1.0,) * len(size)
    radius = radius_mm or max(size) / 2 * min(places)
    weight, learned = conv.weight.detach().numpy(), coefficients(conv)
    place = 0
    for tap in taps(size):
        distance = sum(((t - k // 2) * s) ** 2 for t, k, s in zip(tap, size, places, strict=True)) ** 0.5
        if distance <= radius + 1e-9:
            np.testing.assert_allclose(weight[(..., *tap)], learned[..., place], atol=1e-7)
            place += 1
        else:
            assert not weight[(..., *tap)].any()
    assert place == learned.shape[2] == inside


def interpolated(kernel, at_mm, reference_mm):
    """A kernel (k, k, ...) on a grid of `reference_mm`, interpolated linearly at a place; 0 outside."""
    total = 0.0
    for tap in np.ndindex(kernel.shape):
        share = 1.0
        for t, k, x in zip(tap, kernel.shape, at_mm, strict=True):
            share *= max(0.0, 1 - abs(x / reference_mm - (t - k // 2)))
        total += share * kernel[tap]
    return total


@pytest.mark.parametrize(
    ("conv", "spacing_mm", "reference_mm", "size"),
    [
        (nn.Conv2d(2, 3, 3, padding=1), (1.0, 1.0), 1.0, (3, 3)),
        (nn.Conv2d(2, 3, 3, padding=1), (0.5, 1.0), 1.0, (7, 3)),
        (nn.Conv3d(1, 2, 3, padding=1), (0.5, 0.5, 7.5), None, (3, 3, 1)),
        (nn.Conv3d(1, 2, 3, padding=2, dilation=2), (1.0, 1.5, 2.5), 1.0, (3, 3, 1)),
        (nn.Conv2d(2, 2, (3, 5), padding="same"), (0.8, 0.7), 1.0, (5, 9)),
    ],
)
def test_spacing_interpolates_one_kernel_in_mm(conv, spacing_mm, reference_mm, size):
    axes, image = len(spacing_mm), torch.randn(1, conv.in_channels, *[12] * len(spacing_mm))
    shape, own = conv(image).shape, conv.kernel_size
    spacing(conv, spacing_mm=spacing_mm, reference_mm=reference_mm)
    assert conv.kernel_size == size and conv(image).shape == shape
    reference = reference_mm or min(spacing_mm)
    learned = coefficients(conv)
    kernels = learned.reshape(*learned.shape[:2], *own)
    voxel = prod(s / reference for s in spacing_mm)
    for o, i, tap in product(range(conv.out_channels), range(conv.in_channels), taps(size)):
        at = tuple((tap[a] - size[a] // 2) * spacing_mm[a] for a in range(axes))
        expected = interpolated(kernels[o, i], at, reference) * voxel
        assert float(conv.weight[(o, i, *tap)].detach()) == pytest.approx(expected, abs=1e-5)


def test_init_from_weights_keeps_the_kernel_on_its_own_grid():
    conv = nn.Conv2d(2, 3, 3, padding=1)
    before = conv.weight.detach().clone()
    spacing(conv, spacing_mm=(2.0, 2.0), init_from_weights=True)
    torch.testing.assert_close(conv.weight.detach(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: basis(nn.Conv2d(2, 2, 4)), r"kernel_size must be odd.*\(4, 4\)"),
        (
            lambda: basis(nn.Conv2d(2, 2, 3), bank="wavelets"),
            r"bank must be one of \['gabor', 'jet', .*got 'wavelets'",
        ),
        (lambda: basis(nn.Conv2d(2, 2, 3), bank=[]), r"bank must be one of .*got \[\]"),
        (
            lambda: basis(nn.Conv2d(2, 2, 3), bank=torch.ones(2, 5, 5)),
            r"bank must have shape.*3, 3\), got \(2, 5, 5\)",
        ),
        (lambda: basis(nn.Conv2d(2, 2, 3), bank=torch.zeros(1, 3, 3)), r"every weight zero"),
        (lambda: basis(nn.Conv2d(2, 2, 3), sigma_mm=0.0), r"sigma_mm must be positive, got 0\.0"),
        (lambda: basis(basis(nn.Conv2d(2, 2, 3))), r"parametrized weight already"),
        (lambda: ball(nn.Conv2d(2, 2, 2)), r"kernel_size must be odd.*\(2, 2\)"),
        (lambda: ball(nn.Conv2d(2, 2, 3), radius_mm=-1.0), r"radius_mm must be positive, got -1\.0"),
        (
            lambda: ball(nn.Conv2d(2, 2, 3), spacing_mm=(1.0, 0.0)),
            r"spacing_mm must be positive.*\(1\.0, 0\.0\)",
        ),
        (lambda: spacing(nn.Conv2d(2, 2, 3)), r"spacing_mm is needed.*got None"),
        (
            lambda: spacing(nn.Conv2d(2, 2, 3), spacing_mm=(1.0,)),
            r"spacing_mm must have 2 numbers.*\(1\.0,\)",
        ),
        (
            lambda: spacing(nn.Conv2d(2, 2, 3), spacing_mm=(1.0, 1.0), reference_mm=0.0),
            r"reference_mm must be positive",
        ),
        (
            lambda: spacing(nn.Conv2d(2, 2, 3), spacing_mm=(0.001, 1.0), reference_mm=9.0),
            r"far coarser than the grid",
        ),
        (
            lambda: spacing(nn.Conv2d(2, 2, 3, padding="valid"), spacing_mm=(1.0, 1.0)),
            r"numeric or 'same' padding",
        ),
        (lambda: spacing(nn.Conv2d(2, 2, 3), spacing_mm=(1.0, 5.0)), r"no padding for a kernel of \(3, 1\)"),
        (lambda: acs(nn.Conv2d(2, 2, 3)), r"planes of 3D images, got Conv2d"),
        (lambda: acs(nn.Conv3d(2, 2, (1, 3, 3))), r"one odd number along all axes.*\(1, 3, 3\)"),
    ],
)
def test_errors_name_the_argument_and_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
