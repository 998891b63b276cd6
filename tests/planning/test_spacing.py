"""medconv/planning/spacing.py: the target spacing, thick slices, and the axis across the slices."""

from dataclasses import replace

import pytest
from helpers.plans import fingerprint, reason, single_case

from medconv.planning.limits import PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.spacing import across, slice_axis, target_spacing


def test_target_spacing_is_the_median():
    cases = fingerprint([(9, 9, 9)] * 3, [(1, 1, 1), (1.2, 2, 1.5), (5, 3, 1.5)])
    assert target_spacing(cases) == (1.2, 2.0, 1.5)


@pytest.mark.parametrize(
    ("spacing", "shape", "expected"),
    [
        ((1.0, 2.0), (99, 99, 20), 5.0),  # median 9, 10th percentile 5
        ((1.0, 3.0), (99, 99, 20), 9.0),  # 9 is not more than 3 times as thick as both others
        ((1.0, 2.0), (99, 60, 20), 9.0),  # 20 slices are not fewer than a third of 60
        ((1.0, 2.9), (99, 99, 20), 5.0),
    ],
)
def test_thick_slices_take_the_tenth_percentile(spacing, shape, expected):
    rows = [(*spacing, float(mm)) for mm in range(4, 15)]
    assert target_spacing(fingerprint([shape] * 11, rows)) == (*spacing, expected)


def test_thin_outliers_do_not_make_the_thick_axis_the_finest():
    rows = [(1.0, 1.0, 0.2)] * 4 + [(1.0, 1.0, 5.0)] * 6
    assert target_spacing(fingerprint([(99, 99, 9)] * 10, rows)) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("mm", "planned"), [(0.76761, 0.7676), (12.34567, 12.3457), (0.00025, 0.00025), (4.12345e-6, 4.123e-6)]
)
def test_spacings_keep_four_digits(mm, planned):
    assert target_spacing(single_case((64, 64, 64), (mm,) * 3)) == (planned,) * 3


@pytest.mark.parametrize(
    ("spacing_mm", "axis"),
    [((1, 1, 5), 2), ((5, 1, 1), 0), ((1, 5, 1), 1), ((1, 1, 1), 2), ((2, 2, 1), 1), ((2, 1, 2), 2)],
)
def test_slices_lie_across_the_coarsest_axis(spacing_mm, axis):
    volume = single_case((40, 50, 60), spacing_mm)
    assert slice_axis(volume, 2) == axis
    assert slice_axis(volume, 3) is slice_axis(volume, None) is None


def test_images_of_one_slice_have_no_slice_axis():
    flat = single_case((40, 50), (1.0, 2.0))
    assert slice_axis(flat, 2) is slice_axis(flat, None) is None
    with pytest.raises(ValueError, match=r"spatial_dims=3 needs volumes"):
        slice_axis(flat, 3)


@pytest.mark.parametrize("thin_axis", range(3))
def test_volumes_of_very_few_slices_get_a_2d_network(thin_axis):
    def shape(slices):
        return tuple(slices if axis == thin_axis else 64 for axis in range(3))

    spacing = tuple(5.0 if axis == thin_axis else 1.0 for axis in range(3))
    three_slices = fingerprint([shape(3)] * 9, [spacing] * 9)
    assert slice_axis(three_slices, None) == thin_axis and slice_axis(three_slices, 3) is None
    flat = plan(three_slices)
    assert (flat.spatial_dims, flat.slice_axis, flat.patch_size) == (2, thin_axis, (64, 64))
    assert "so few slices" in reason(flat, "dimensions")
    assert plan(fingerprint([shape(4)] * 9, [spacing] * 9)).spatial_dims == 3
    assert plan(three_slices, PlanOverrides(spatial_dims=3)).spatial_dims == 3


def test_thick_slices_stay_volumes():
    thick = fingerprint([(9, 60, 64)] * 9, [(10.0, 1.0, 1.2)] * 9)
    assert slice_axis(thick, None) is slice_axis(thick, 3) is None
    assert plan(thick).spatial_dims == 3


def test_the_plan_of_slices_has_the_two_axes_of_their_plane():
    volumes = fingerprint([(40, 50, 60)] * 2, [(1.0, 5.0, 2.0), (1.0, 7.0, 2.0)])
    planned = plan(across(volumes, 1))
    assert planned.spacing_mm == (1.0, 2.0) and len(planned.patch_size) == 2
    assert planned.patch_size[0] >= 40 and planned.patch_size[1] >= 60
    with pytest.raises(ValueError, match=r"patch_size needs 2 positive numbers"):
        plan(across(volumes, 1), PlanOverrides(patch_size=[16, 16, 16]))


def test_the_config_chooses_the_slice_axis():
    volume = fingerprint([(20, 30, 40)], [(1.0, 1.0, 5.0)])
    assert slice_axis(volume, 2) == 2 and slice_axis(volume, 2, 0) == 0
    flat = replace(volume, spatial_dims=2)
    for wrong, dims, axis in ((volume, 3, 0), (volume, None, 0), (volume, 2, 3), (flat, 2, 0)):
        with pytest.raises(ValueError, match="slice_axis must be 0, 1 or 2"):
            slice_axis(wrong, dims, axis)
