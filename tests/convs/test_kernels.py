"""medconv/convs/kernels.py: filter banks sampled in mm."""

from math import exp

import numpy as np
import pytest
import torch
from reference.convolution import jet

from medconv.convs import gaussian_jet

SIZES = [((3, 3), 6), ((5, 3), 6), ((3, 3, 3), 10), ((1, 3, 3), 6), ((1, 1, 5), 3), ((1, 1, 1), 1), ((3,), 3)]


@pytest.mark.parametrize(("kernel_size", "filters"), SIZES)
def test_filter_count_shape_and_unit_norm(kernel_size: tuple[int, ...], filters: int) -> None:
    bank = gaussian_jet(kernel_size)
    assert bank.shape == (filters, *kernel_size) and bank.dtype == torch.float32
    torch.testing.assert_close(bank.flatten(1).norm(dim=1), torch.ones(filters))


@pytest.mark.parametrize(
    ("kernel_size", "spacing", "sigma"),
    [((3, 5), (1.0, 2.0), None), ((3, 3, 3), (0.5, 0.5, 2.0), 1.1), ((1, 3, 5), (7.5, 0.5, 0.5), None), ((5,), None, 2.0)],
)
def test_equals_the_formula_voxel_by_voxel(kernel_size: tuple[int, ...], spacing: tuple | None, sigma: float | None) -> None:
    places = spacing or (1.0,) * len(kernel_size)
    expected = jet(kernel_size, places, sigma or 0.7 * min(places))
    np.testing.assert_allclose(gaussian_jet(kernel_size, spacing, sigma).numpy(), np.stack(expected), atol=1e-6)


@pytest.mark.parametrize("kernel_size", [(3, 3), (5, 5, 3), (1, 3, 3)])
def test_derivatives_do_not_respond_to_a_constant(kernel_size: tuple[int, ...]) -> None:
    bank = gaussian_jet(kernel_size, (2.0, *(1.0,) * (len(kernel_size) - 1)))
    responses = bank.double().flatten(1).sum(1)
    assert responses[0] > 0.5
    assert responses[1:].abs().max() < 1e-6


def test_coarse_axis_falls_off_with_its_distance_in_mm() -> None:
    gaussian = gaussian_jet((3, 3), (1.0, 2.0), sigma_mm=1.0)[0]
    along_fine, along_coarse = gaussian[2, 1] / gaussian[1, 1], gaussian[1, 2] / gaussian[1, 1]
    assert along_fine == pytest.approx(exp(-0.5), rel=1e-5)
    assert along_coarse == pytest.approx(exp(-2.0), rel=1e-5)


def test_default_width_follows_the_finest_spacing() -> None:
    torch.testing.assert_close(gaussian_jet((3, 3), (0.5, 1.5)), gaussian_jet((3, 3), (2.0, 6.0)))
    torch.testing.assert_close(gaussian_jet((3, 3), (0.5, 1.5)), gaussian_jet((3, 3), (0.5, 1.5), sigma_mm=0.35))


def test_permuting_the_axes_permutes_the_filters() -> None:
    bank, turned = gaussian_jet((3, 5), (1.0, 2.0)), gaussian_jet((5, 3), (2.0, 1.0))
    order = [0, 2, 1, 5, 4, 3]  # blob; edges; lines and the corner between them
    torch.testing.assert_close(turned, bank[order].transpose(1, 2))


@pytest.mark.parametrize("coarse", [8.0, 15.0, 500.0])
def test_thick_slices_give_finite_filters_of_unit_norm(coarse: float) -> None:
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
def test_errors_name_the_argument_and_what_came(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gaussian_jet(*arguments)
