"""medconv/planning/spacing.py: the target spacing, thick slices, and the axis across the slices."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.plans import fingerprint, published, reason, single_case

from medconv.planning.limits import PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.spacing import across, coarser, slice_axis, target_spacing, view_share, voxels_to_keep
from medconv.planning.topology import Budget


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
    assert "medconv ensemble --vary" in reason(plan(thick), "dimensions")
    assert "ensemble" not in reason(plan(single_case((60, 60, 60), (1.0, 1.0, 1.2))), "dimensions")


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


# As of `LA2018`: 80 volumes with a left atrium, of which a small patch on the images' grid shows a twentieth
ATRIA = replace(fingerprint([(192, 142, 88)] * 80, [(0.625,) * 3] * 80), thickness_mm=((30.0, 19.0, 13.0),))
LITTLE_TIME = Budget(1.0, size="small")


def with_structure(fingerprint, *thickness_mm):
    return replace(fingerprint, thickness_mm=(*fingerprint.thickness_mm, thickness_mm))


def test_the_view_is_the_share_of_voxels_that_a_patch_covers():
    assert view_share((32, 32, 32), (64, 64, 64)) == 0.125
    assert view_share((128, 32), (64, 64)) == 0.5  # what lies outside of the image shows nothing


def test_fine_axes_become_coarser_before_thick_slices():
    assert coarsest((1.5, 1.5, 10.0), [], until=10.5)[0] == pytest.approx(5.2, abs=0.2)
    assert coarser((1.0, 1.0), [], 0.5) == (1.05, 1.05)
    assert coarser((1.0, 1.9, 2.0), [], 0.5) == (1.05, 1.99, 2.0)


def coarsest(spacing, thickness, view=0.5, until=99.0):
    """The last of ever coarser spacings. Args: until: an axis has so many mm."""
    while max(spacing) < until:
        next_spacing = coarser(spacing, thickness, view)
        if next_spacing is None:
            break
        spacing = next_spacing
    return spacing


@pytest.mark.parametrize(("view", "num_voxels"), [(0.1, 4), (0.2, 6)])
def test_the_thinnest_structure_keeps_its_voxels(view, num_voxels):
    spacing = coarsest((0.5, 0.5, 0.5), [(30.0, 30.0, 30.0), (4.0, 12.0, 12.0)], view)
    assert 4.0 / num_voxels / 1.06 < spacing[0] <= 4.0 / num_voxels
    assert len(set(spacing)) == 1, "the others become no coarser than the axis that stays"


def test_thick_slices_do_not_thin_out_what_lies_in_their_plane():
    """Nor do they keep the other axes from becoming coarser, however thin a structure is across them."""
    in_plane, _, across = coarsest((1.5, 1.5, 10.0), [(12.0, 12.0, 24.0)])
    assert 12.0 / 6 / 1.06 < in_plane <= 12.0 / 6 and across == 10.0


def test_finer_axes_become_as_coarse_as_one_that_stays():
    """As of the pancreas: 2.5 mm across slices are all that 12 mm allow, not so 0.8 mm within them."""
    spacing = coarsest((0.8, 0.8, 2.4), [(15.0, 15.0, 15.0)])
    assert spacing[2] == pytest.approx(2.4, abs=0.1)
    assert 2.4 / 1.06 < spacing[0] == spacing[1] <= spacing[2]


def test_a_class_that_no_case_has_bounds_nothing():
    for thickness in ([], [(0.0, 0.0, 0.0)]):
        assert max(coarsest((0.5, 0.5, 0.5), thickness)) >= 99.0


def test_with_little_time_the_grid_becomes_coarse_enough_to_see_the_whole_image():
    made = plan(ATRIA, budget=LITTLE_TIME)
    assert 1.25 < made.spacing_mm[0] < 2.0 and len(set(made.spacing_mm)) == 1
    median = np.array([192, 142, 88]) * 0.625 / made.spacing_mm
    assert all(made.patch_size >= median.round())
    text = reason(made, "spacing")
    assert "coarser than the images' 0.625 x 0.625 x 0.625" in text
    assert "covers 100 % of the median image" in text
    assert f"keeps {13 / made.spacing_mm[2]:.2g} voxels" in text


def test_voxels_are_counted_along_the_axes_that_became_coarser():
    """Across thick slices a structure may have two voxels, but not because of the grid."""
    heart = fingerprint([(216, 256, 10)] * 20, [(1.5, 1.5, 10.0)] * 20)
    made = plan(replace(heart, thickness_mm=((20.0, 20.0, 25.0),)), budget=LITTLE_TIME)
    assert made.spacing_mm[2] == 10.0
    assert f"keeps {20 / made.spacing_mm[0]:.2g} voxels" in reason(made, "spacing")


def test_larger_sizes_see_as_much_on_finer_grids():
    grids = [plan(ATRIA, budget=replace(LITTLE_TIME, size=size)).spacing_mm for size in ("large", "small")]
    assert grids[0] < grids[1]
    most = plan(ATRIA, budget=replace(LITTLE_TIME, size="large", memory_gb=24))
    assert most.spacing_mm == (0.625,) * 3  # all of it fits


def test_a_full_size_has_the_grid_of_the_images():
    full = plan(ATRIA, budget=replace(LITTLE_TIME, size="full"))
    large = plan(ATRIA, budget=replace(LITTLE_TIME, size="large"))
    assert full.spacing_mm == (0.625,) * 3 < large.spacing_mm
    assert full.channels[:4] == large.channels[:4]


def test_a_small_structure_bounds_the_grid():
    small = with_structure(ATRIA, 3.0, 3.0, 3.0)
    made = plan(small, budget=LITTLE_TIME)
    assert made.spacing_mm[0] == pytest.approx(3 / 4, rel=0.05)
    thin = with_structure(ATRIA, 2.0, 2.0, 2.0)
    made = plan(thin, budget=LITTLE_TIME)
    assert made.spacing_mm == (0.625,) * 3
    assert "the thinnest structure would have fewer than 4 voxels" in reason(made, "patch")


def test_a_structure_has_never_fewer_voxels_than_the_reason_says():
    """Legs, 272 x 272 x 1000 voxels. While a patch sees an eighth of them, 4 voxels suffice; then 6 do not."""
    legs = fingerprint([(272, 272, 1000)] * 11, [(1.6, 1.6, 1.0)] * 11, classes=38)
    legs = with_structure(legs, 20.0, 20.0, 60.0)
    made = plan(legs, budget=Budget(1.0, precision="bf16-mixed", size="large"))
    kept = 20 / max(made.spacing_mm[:2])
    assert 4 <= kept < 5
    assert f"would have fewer than {kept:.2g} voxels" in reason(made, "patch")


@pytest.mark.parametrize("key", ["channels", "kernel_sizes"])
def test_a_grid_becomes_only_as_coarse_as_the_stages_of_the_config_allow(key):
    """As no patch of whole images has the six stages of these lists, it shows a part on a finer grid."""
    value = {"channels": [8, 16, 32, 64, 128, 128], "kernel_sizes": [3] * 6}[key]
    whole = plan(ATRIA, budget=LITTLE_TIME)
    made = plan(ATRIA, PlanOverrides(**{key: value}), LITTLE_TIME)
    assert len(whole.channels) < len(made.channels) == 6
    assert 0.625 < made.spacing_mm[0] < whole.spacing_mm[0]
    assert f"a coarser grid would have fewer stages than {key}" in reason(made, "patch")


def test_a_patch_that_sees_enough_does_not_thin_structures_out():
    """A fifth of a picture in a patch is context enough for its vessels."""
    vessels = replace(
        fingerprint([(565, 584)] * 20, [(1.0, 1.0)] * 20, channels=3), thickness_mm=((6.2, 6.2),)
    )
    made = plan(vessels, budget=LITTLE_TIME)
    assert made.spacing_mm == (1.0, 1.0)
    view = view_share(made.patch_size, (565, 584))
    assert voxels_to_keep(view) == 6
    assert view < 0.25 and "would have fewer than 6 voxels" in reason(made, "patch")


@pytest.mark.parametrize("name", ["hippocampus", "heart", "liver", "prostate"])
def test_with_memory_as_the_only_limit_the_grid_is_that_of_the_images(name):
    assert plan(published(name)).spacing_mm == plan(published(name), budget=Budget()).spacing_mm


def test_an_image_that_a_patch_covers_keeps_its_grid():
    assert plan(published("hippocampus"), budget=LITTLE_TIME).spacing_mm == (1.0, 1.0, 1.0)


def test_a_grid_that_the_config_sets_is_kept():
    made = plan(ATRIA, PlanOverrides(spacing_mm=(0.7, 0.7, 0.7)), LITTLE_TIME)
    assert made.spacing_mm == (0.7, 0.7, 0.7)
    assert "would show more" in reason(made, "patch")


def test_a_patch_that_the_config_sets_is_kept_and_the_grid_with_it():
    made = plan(ATRIA, PlanOverrides(patch_size=(64, 48, 32)), LITTLE_TIME)
    assert made.patch_size == (64, 48, 32) and made.spacing_mm == (0.625,) * 3


def test_slices_of_volumes_are_bounded_by_what_lies_in_their_plane():
    """The structure is thin across the first axis alone, which slices do not see."""
    volumes = fingerprint([(3, 512, 512)] * 20, [(5.0, 0.5, 0.5)] * 20)
    volumes = replace(volumes, thickness_mm=((5.0, 5.4, 30.0),))
    made = plan(volumes, budget=LITTLE_TIME)
    assert made.slice_axis == 0
    assert made.spacing_mm[0] == made.spacing_mm[1]
    assert 0.85 < made.spacing_mm[0] <= 5.4 / 6
    assert "thinnest structure keeps 6" in reason(made, "spacing")
