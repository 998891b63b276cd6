"""medconv/data/augmentation/spatial.py: gathering against `grid_sample`, splines against SciPy's."""

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch.nn import functional as F

from medconv.data.augmentation import spatial as resampling
from medconv.data.augmentation.spatial import control_points, reach, resample, spline_field

SIZES = {2: ((9, 12), (13, 8)), 3: ((9, 12, 7), (13, 8, 10))}


def problem(axes: int, bends: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(axes)
    size, source = SIZES[axes]
    image = torch.randn(3, 2, *source, generator=generator, dtype=dtype)
    label = torch.randint(0, 9, (3, 1, *source), generator=generator).to(torch.uint8)
    matrix = torch.eye(axes) + 0.3 * torch.randn(3, axes, axes, generator=generator)
    shift = torch.randn(3, axes, generator=generator)
    field = 2 * torch.randn(3, axes, *size, generator=generator) if bends else None
    return image, label, matrix, shift, field  # type: ignore[return-value]


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("bends", [False, True])
@pytest.mark.parametrize("piece", [1, 50, 10**6])
def test_gathering_equals_grid_sample(
    axes: int, bends: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pieces; also where much comes from outside."""
    monkeypatch.setattr(resampling, "_PIECE", piece)
    image, label, matrix, shift, field = problem(axes, bends)
    size = SIZES[axes][0]
    seen, seen_label = resample(image, label, matrix, shift, field, size)
    grid = resampling._grid(image, matrix, shift, field, size)
    torch.testing.assert_close(seen, F.grid_sample(image, grid, align_corners=False), rtol=0, atol=2e-5)
    wanted = F.grid_sample(label.float(), grid, mode="nearest", align_corners=False).to(label.dtype)
    assert torch.equal(seen_label, wanted) and (seen == 0).any() and (seen_label > 0).any()


def test_without_a_frame_where_nothing_comes_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    image, label, _, _, _ = problem(3, False)
    matrix = torch.eye(3).mul(0.5).repeat(3, 1, 1)
    expected = resample(image, label, matrix, torch.zeros(3, 3), None, (5, 5, 5))
    monkeypatch.setattr(F, "pad", lambda *_: pytest.fail("framed"))
    again = resample(image, label, matrix, torch.zeros(3, 3), None, (5, 5, 5))
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


def test_sources_of_more_voxels_than_float32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    image, label, matrix, shift, _ = problem(3, False)
    expected = resample(image, label, matrix, shift, None, (6, 6, 6))
    monkeypatch.setattr(resampling, "_EXACT", 100)
    for a, b in zip(expected, resample(image, label, matrix, shift, None, (6, 6, 6)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_far_end_of_a_source_that_float32_cannot_count() -> None:
    """Indices beyond 2^24 in float32 would miss every other voxel."""
    image = torch.zeros(1, 1, 260, 260, 260)
    image[0, 0, -3:, -3:, -4] = 1
    label = image.to(torch.uint8)
    seen, seen_label = resample(image, label, torch.eye(3)[None], torch.full((1, 3), 127.0), None, (6, 6, 6))
    assert torch.equal(seen, image[..., -6:, -6:, -6:]) and torch.equal(seen_label, label[..., -6:, -6:, -6:])


def test_a_single_slice_can_be_resampled() -> None:
    image, label = torch.randn(1, 1, 8, 9, 1), torch.ones(1, 1, 8, 9, 1, dtype=torch.uint8)
    seen, seen_label = resample(image, label, torch.eye(3)[None], torch.zeros(1, 3), None, (8, 9, 1))
    torch.testing.assert_close(seen, image, rtol=0, atol=1e-5)
    assert torch.equal(seen_label, label)


def test_reach_is_where_the_corners_look() -> None:
    matrix, size = torch.tensor([[0.8, -0.6], [0.6, 0.8]]), (11, 21)
    corners = torch.tensor([[5.0, 10.0], [5.0, -10.0], [-5.0, 10.0], [-5.0, -10.0]]) @ matrix.T
    torch.testing.assert_close(
        reach(matrix, torch.tensor([0.0, -2.0]), size), corners.abs().amax(0) + torch.tensor([0, 2.0])
    )


def test_spline_field_is_the_cubic_b_spline() -> None:
    (n, far), rng = (17, 4.0), np.random.default_rng(0)
    (points,) = control_points((n,), (far,))
    control = rng.normal(size=points)
    spline = BSpline(np.arange(-3, points + 1) * far, control, 3)  # knots a distance apart
    field = spline_field(torch.tensor(control)[None, None].float(), (n,), (far,))[0, 0]
    np.testing.assert_allclose(field.numpy(), spline(np.arange(n)), atol=1e-5)


def test_spline_field_of_equal_control_points_is_constant_and_separable() -> None:
    size, distance = (10, 7, 9), (3.0, 2.5, 4.0)
    points = control_points(size, distance)
    torch.testing.assert_close(
        spline_field(torch.full((1, 3, *points), 2.0), size, distance), torch.full((1, 3, *size), 2.0)
    )
    control = torch.randn(2, 3, *points)
    assert spline_field(control, size, distance).abs().max() <= control.abs().max()
