"""medconv/data/augmentation/spatial.py: resampling compared with `grid_sample`, splines with SciPy."""

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch.nn import functional as F

from medconv.data.augmentation import spatial
from medconv.data.augmentation.spatial import control_points, mirrored_axes, reach, resample, spline_field
from medconv.utils.errors import ArgumentError

SIZES = {2: ((9, 12), (13, 8)), 3: ((9, 12, 7), (13, 8, 10))}


def resampling_inputs(axes, bends, dtype=torch.float32):
    generator = torch.Generator().manual_seed(axes)
    size, source = SIZES[axes]
    image = torch.randn(3, 2, *source, generator=generator, dtype=dtype)
    label = torch.randint(0, 9, (3, 1, *source), generator=generator).to(torch.uint8)
    matrix = torch.eye(axes) + 0.3 * torch.randn(3, axes, axes, generator=generator)
    shift = torch.randn(3, axes, generator=generator)
    field = 2 * torch.randn(3, axes, *size, generator=generator) if bends else None
    return image, label, matrix, shift, field


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("bends", [False, True])
@pytest.mark.parametrize("piece", [1, 50, 10**6])
def test_resample_equals_grid_sample(axes, bends, piece, monkeypatch):
    """With pieces of any size; many voxels lie outside the source."""
    monkeypatch.setattr(spatial, "_PIECE", piece)
    image, label, matrix, shift, field = resampling_inputs(axes, bends)
    size = SIZES[axes][0]
    resampled, resampled_label = resample(image, label, matrix, shift, field, size)
    monkeypatch.setattr(spatial, "ONE_BY_ONE", ())
    expected, expected_label = resample(image, label, matrix, shift, field, size)
    torch.testing.assert_close(resampled, expected, rtol=0, atol=2e-5)
    assert torch.equal(resampled_label, expected_label)
    assert (resampled == 0).any() and (resampled_label > 0).any()


@pytest.mark.parametrize("size", [(5, 6), (3, 4, 7)])
def test_the_grid_is_that_of_torch(size):
    theta = torch.randn(2, len(size), len(size) + 1, generator=torch.Generator().manual_seed(0))
    expected = F.affine_grid(theta, [2, 1, *size], align_corners=False)
    torch.testing.assert_close(spatial._grid(theta, size), expected)


def test_sources_are_padded_only_if_voxels_lie_outside(monkeypatch):
    image, label, _, _, _ = resampling_inputs(3, False)
    matrix = torch.eye(3).mul(0.5).repeat(3, 1, 1)
    expected = resample(image, label, matrix, torch.zeros(3, 3), None, (5, 5, 5))
    monkeypatch.setattr(F, "pad", lambda *_: pytest.fail("padded"))
    again = resample(image, label, matrix, torch.zeros(3, 3), None, (5, 5, 5))
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


def test_float64_indices_give_the_same_as_float32(monkeypatch):
    image, label, matrix, shift, _ = resampling_inputs(3, False)
    expected = resample(image, label, matrix, shift, None, (6, 6, 6))
    monkeypatch.setattr(spatial, "_EXACT", 100)
    for a, b in zip(expected, resample(image, label, matrix, shift, None, (6, 6, 6)), strict=True):
        torch.testing.assert_close(a, b)


def test_voxels_beyond_2_to_24_are_addressed_exactly():
    """Indices beyond 2^24 in float32 would miss every other voxel."""
    image = torch.zeros(1, 1, 260, 260, 260)
    image[0, 0, -3:, -3:, -4] = 1
    label = image.to(torch.uint8)
    shift = torch.full((1, 3), 127.0)
    resampled, resampled_label = resample(image, label, torch.eye(3)[None], shift, None, (6, 6, 6))
    assert torch.equal(resampled, image[..., -6:, -6:, -6:])
    assert torch.equal(resampled_label, label[..., -6:, -6:, -6:])


def test_a_single_slice_can_be_resampled():
    image, label = torch.randn(1, 1, 8, 9, 1), torch.ones(1, 1, 8, 9, 1, dtype=torch.uint8)
    same = resample(image, label, torch.eye(3)[None], torch.zeros(1, 3), None, (8, 9, 1))
    torch.testing.assert_close(same[0], image, rtol=0, atol=1e-5)
    assert torch.equal(same[1], label)


def test_reach_is_the_distance_to_the_farthest_corner():
    matrix, size = torch.tensor([[0.8, -0.6], [0.6, 0.8]]), (11, 21)
    corners = torch.tensor([[5.0, 10.0], [5.0, -10.0], [-5.0, 10.0], [-5.0, -10.0]]) @ matrix.T
    expected = corners.abs().amax(0) + torch.tensor([0, 2.0])
    torch.testing.assert_close(reach(matrix, torch.tensor([0.0, -2.0]), size), expected)


def test_spline_field_is_the_cubic_b_spline():
    (n, far), rng = (17, 4.0), np.random.default_rng(0)
    (points,) = control_points((n,), (far,))
    control = rng.normal(size=points)
    spline = BSpline(np.arange(-3, points + 1) * far, control, 3)  # knots a distance apart
    field = spline_field(torch.tensor(control)[None, None].float(), (n,), (far,))[0, 0]
    np.testing.assert_allclose(field.numpy(), spline(np.arange(n)), atol=1e-5)


def test_spline_field_of_equal_control_points_is_constant_and_separable():
    size, distance = (10, 7, 9), (3.0, 2.5, 4.0)
    points = control_points(size, distance)
    field = spline_field(torch.full((1, 3, *points), 2.0), size, distance)
    torch.testing.assert_close(field, torch.full((1, 3, *size), 2.0))
    control = torch.randn(2, 3, *points)
    assert spline_field(control, size, distance).abs().max() <= control.abs().max()


def test_all_are_the_spatial_axes():
    assert mirrored_axes("all", 3) == (0, 1, 2)
    assert mirrored_axes([2, 0], 3) == (2, 0)


@pytest.mark.parametrize("axes", [[0, 0], [3], [-1], [True], "0", 1, None])
def test_other_than_different_spatial_axes_are_refused(axes):
    with pytest.raises(
        ArgumentError, match=r"^mirror_axes must be different spatial axes from 0 to 2, or `all`, got"
    ):
        mirrored_axes(axes, 3)
