"""medconv/convs/filter_banks.py: filter banks sampled in mm."""

from math import exp

import numpy as np
import pytest
import torch
from reference.convolution import jet

from medconv.convs import filter_bank, gabor, gaussian_jet, laplacian_of_gaussian, lines
from medconv.convs.filter_banks import BANKS

SIZES = [((3, 3), 6), ((5, 3), 6), ((3, 3, 3), 10), ((1, 3, 3), 6), ((1, 1, 5), 3), ((1, 1, 1), 1), ((3,), 3)]


@pytest.mark.parametrize(("kernel_size", "filters"), SIZES)
def test_filter_count_shape_and_unit_norm(kernel_size, filters):
    bank = gaussian_jet(kernel_size)
    assert bank.shape == (filters, *kernel_size) and bank.dtype == torch.float32
    torch.testing.assert_close(bank.flatten(1).norm(dim=1), torch.ones(filters))


@pytest.mark.parametrize(
    ("kernel_size", "spacing", "sigma"),
    [
        ((3, 5), (1.0, 2.0), None),
        ((3, 3, 3), (0.5, 0.5, 2.0), 1.1),
        ((1, 3, 5), (7.5, 0.5, 0.5), None),
        ((5,), None, 2.0),
    ],
)
def test_the_jet_equals_its_formula_voxel_by_voxel(kernel_size, spacing, sigma):
    places = spacing or (1.0,) * len(kernel_size)
    expected = jet(kernel_size, places, sigma or 0.7 * min(places))
    np.testing.assert_allclose(
        gaussian_jet(kernel_size, spacing, sigma).numpy(), np.stack(expected), atol=1e-6
    )


def test_default_width_follows_the_finest_spacing():
    torch.testing.assert_close(gaussian_jet((3, 3), (0.5, 1.5)), gaussian_jet((3, 3), (2.0, 6.0)))
    torch.testing.assert_close(
        gaussian_jet((3, 3), (0.5, 1.5)), gaussian_jet((3, 3), (0.5, 1.5), sigma_mm=0.35)
    )


@pytest.mark.parametrize("coarse", [8.0, 15.0, 500.0])
def test_thick_slices_give_finite_filters_of_unit_norm(coarse):
    bank = gaussian_jet((3, 3, 3), (0.4, 0.4, coarse))
    assert bank.isfinite().all()
    torch.testing.assert_close(bank.flatten(1).norm(dim=1), torch.ones(10))
    edge = bank[3]  # the derivative across slices takes the difference of the two neighbours
    assert edge[1, 1, 0] == -edge[1, 1, 2] and edge[1, 1, 1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 4),), r"kernel_size must be odd.*\(3, 4\)"),
        (((3, 3), (1.0,)), r"spacing_mm must have 2 numbers.*\(1\.0,\)"),
        (((3, 3), (1.0, 0.0)), r"spacing_mm .*positive.*\(1\.0, 0\.0\)"),
        (((3, 3), (1.0, float("nan"))), r"spacing_mm .*positive.*nan"),
        (((3, 3), (1.0, 1.0), -1.0), r"sigma_mm .*positive.*-1\.0"),
    ],
)
def test_errors_name_the_argument_and_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_jet(*arguments)


@pytest.mark.parametrize(
    ("bank", "size", "filters"),
    [
        (laplacian_of_gaussian, (5, 5), 4),
        (laplacian_of_gaussian, (5, 5, 5), 4),
        (laplacian_of_gaussian, (1, 1), 1),
        (lines, (3, 3), 5),
        (lines, (3, 3, 3), 14),
        (lines, (1, 3, 3), 5),
        (lines, (1, 1, 3), 1),
        (gabor, (5, 5), 9),
        (gabor, (5, 5, 5), 27),
        (gabor, (1, 1, 3), 3),
    ],
)
def test_only_the_first_filter_of_a_bank_responds_to_a_constant(bank, size, filters):
    flat = bank(size, (1.5, *(1.0,) * (len(size) - 1)), 0.9).double().flatten(1)
    assert flat.shape[0] == filters and flat.isfinite().all()
    torch.testing.assert_close(flat.norm(dim=1), torch.ones(filters, dtype=torch.float64))
    assert flat[0].sum() > 0.5
    assert flat[1:].sum(1).abs().lt(1e-6).all()


def test_laplacian_equals_the_formula():
    size, spacing, sigma = (5, 7), (1.0, 0.8), 1.1
    for index, scale in enumerate((1.0, 1.5, 2.0), start=1):
        expected = np.zeros(size)
        for a in range(5):
            for b in range(7):
                r2 = ((a - 2) * 1.0) ** 2 + ((b - 3) * 0.8) ** 2
                s2 = (sigma * scale) ** 2
                expected[a, b] = (2 - r2 / s2) * exp(-r2 / (2 * s2))
        expected -= expected.mean()
        laplacian = laplacian_of_gaussian(size, spacing, sigma)[index]
        np.testing.assert_allclose(laplacian.numpy(), expected / np.linalg.norm(expected), atol=1e-6)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 0.5, 1.5)])
def test_each_line_filter_responds_most_to_its_own_line(spacing):
    """A bright line through the centre voxel, along each of the 13 directions of the voxel grid."""
    bank = lines((5, 5, 5), spacing, 0.9)[1:]
    steps = [s for s in np.ndindex(3, 3, 3) if next((c for c in np.array(s) - 1 if c), 0) > 0]
    for own, step in enumerate(steps):
        image = torch.zeros(5, 5, 5)
        for t in (-2, -1, 0, 1, 2):
            image[tuple(2 + t * (c - 1) for c in step)] = 1.0
        assert int((bank * image).sum((1, 2, 3)).argmax()) == own


def test_gabor_pairs_are_even_and_odd_waves_along_their_direction():
    bank = gabor((7, 7), None, 1.5)
    directions = [(0, 1), (1, -1), (1, 0), (1, 1)]
    for index, direction in enumerate(directions):
        even, odd = bank[1 + 2 * index], bank[2 + 2 * index]
        unit = np.array(direction) / np.linalg.norm(direction)
        cos, sin = np.zeros((7, 7)), np.zeros((7, 7))
        for a in range(7):
            for b in range(7):
                place = np.array([a - 3, b - 3]) / 1.5
                gaussian = exp(-(place @ place) / 2)
                cos[a, b], sin[a, b] = (
                    np.cos(place @ unit * np.pi / 2) * gaussian,
                    np.sin(place @ unit * np.pi / 2) * gaussian,
                )
        cos -= cos.mean()
        np.testing.assert_allclose(even.numpy(), cos / np.linalg.norm(cos), atol=1e-6)
        np.testing.assert_allclose(odd.numpy(), sin / np.linalg.norm(sin), atol=1e-6)


def test_several_banks_by_name_are_joined_without_repeated_filters():
    both = filter_bank(["jet", "lines"], (3, 3))
    torch.testing.assert_close(both, torch.cat([gaussian_jet((3, 3)), lines((3, 3))[1:]]))
    for word, make in BANKS.items():
        torch.testing.assert_close(filter_bank(word, (3, 3, 3)), make((3, 3, 3), None, None))
