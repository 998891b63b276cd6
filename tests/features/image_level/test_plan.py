"""Plans of networks that take whole images of one size."""

from functools import partial

import pytest
from helpers.plans import fingerprint, reason, single_case

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.features.image_level.planning import WholeImages
from medconv.planning import planner
from medconv.planning.limits import SIZES, PlanOverrides
from medconv.planning.spacing import median_shape
from medconv.planning.topology import GB, Budget, Network, step_bytes

plan = partial(planner.plan, kind=WholeImages)


@pytest.mark.parametrize(
    ("shape", "batch", "stages"), [((28, 28), 128, 3), ((28, 28, 28), 32, 3), ((224, 224), 16, 6)]
)
def test_image_level_plans_take_whole_images(shape, batch, stages):
    dims = len(shape)
    images = Fingerprint(
        dims, (shape,) * 5000, ((1.0,) * dims,) * 5000, ({"mean": 0.0, "std": 1.0},), ((),) * 5000
    )

    def planned(**values):
        return plan(images, PlanOverrides(**values), Budget(8.0), ("grey",), 2)

    plain = planned()
    assert plain.patch_size == shape and plain.batch_size == batch and len(plain.channels) == stages
    assert plain.normalisation == ("dataset",)
    assert planned(resize=(17,) * dims).patch_size == (20,) * dims
    squeezed = planned(resize=(14,) * (dims - 1) + shape[-1:])
    assert squeezed.spacing_mm == (shape[0] / 14,) * (dims - 1) + (1.0,), "mm of what the network sees"
    assert planned(resize=(14,) * dims, spacing_mm=(3.0,) * dims).spacing_mm == (3.0,) * dims
    with pytest.raises(ValueError, match=r"resize needs .* numbers, one per spatial axis"):
        planned(resize=(17,))
    if dims == 3:
        with pytest.raises(
            ValueError, match=r"spatial_dims must be 3 or null, as the network takes whole images"
        ):
            planned(spatial_dims=2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("shape", "spacing"),
    [
        ((3000, 2500), (1.0, 1.0)),
        ((40000, 3000), (1.0, 1.0)),
        ((512, 512, 300), (0.8, 0.8, 1.0)),
        ((320, 320, 11), (0.5, 0.5, 7.5)),
    ],
)
def test_whole_images_that_memory_does_not_hold_become_coarser(size, shape, spacing):
    """They have no patches to shrink: a CT once got a step of 80 GB."""
    images = single_case(shape, spacing)
    budget = Budget(1.0, precision="bf16-mixed", size=size)
    planned = plan(images, PlanOverrides(), budget)
    median = median_shape(images, planned.spacing_mm)
    assert all(edge >= median_edge for edge, median_edge in zip(planned.patch_size, median, strict=True))
    assert planned.batch_size >= 2 and _gb(planned, planned.batch_size, budget) <= 1
    assert reason(planned, "spacing").endswith("so that memory holds whole images")
    finer_mm = [mm / 1.2 for mm in planned.spacing_mm]
    finer = plan(images, PlanOverrides(spacing_mm=finer_mm, batch_size=2), budget)
    assert _gb(planned, 2, budget) <= SIZES[size].memory_share < _gb(finer, 2, budget)


def _gb(planned, batch, budget):
    network = Network(planned.strides, planned.kernel_sizes, planned.channels)
    return step_bytes(network, planned.patch_size, batch, 1, 2, budget) / GB


@pytest.mark.parametrize(("longest", "lost"), [(40, 0), (50, 20), (80, 50)])
def test_volumes_that_lose_much_at_their_borders_are_counted(longest, lost, caplog):
    images = fingerprint([(40, 40, 40)] * 3 + [(40, 40, longest)], [(1.0, 1.0, 1.0)] * 4)
    planned = plan(images, PlanOverrides())
    cut = f"1 of 4 images are cut at their borders, by up to {lost} % of an axis"
    assert (cut in reason(planned, "patch")) == (lost > 0)
    assert (f"{cut}: the network takes 40 x 40 x 40 voxels" in caplog.text) == (lost > 25)
    plan(images, PlanOverrides(resize=(40, 40, 40)), warns=True)
    assert caplog.text.count("are cut") == (lost > 25)


def test_a_grid_that_is_set_holds_for_whole_images(caplog):
    images = single_case((3000, 2500), (1, 1))
    for values in ({"spacing_mm": (1.0, 1.0)}, {"resize": (3000, 2500)}, {"patch_size": (3072, 2560)}):
        planned = plan(images, PlanOverrides(**values), Budget(1.0))
        assert planned.patch_size == (3072, 2560) and planned.spacing_mm == (1.0, 1.0)
        assert "the budget is 1" in caplog.text
        caplog.clear()


def test_a_budget_that_holds_no_image_is_refused():
    with pytest.raises(
        ValueError, match=r"memory_gb: the smallest patch, 16 x 14 .*, the budget is 0.001 GB"
    ):
        plan(single_case((3000, 2500), (1, 1)), PlanOverrides(), Budget(0.001))


@pytest.mark.parametrize(
    "values",
    [{"strides": [(2, 2, 2)] * 6}, {"channels": [64, 128, 256]}, {"batch_size": 32}],
    ids=lambda values: next(iter(values)),
)
def test_whole_images_take_all_of_the_memory_where_their_share_does_not_help(values):
    """Weights, padding for strides or a batch that is set may exceed the share whatever the grid."""
    budget = Budget(1.0, precision="bf16-mixed", size="tiny")
    planned = plan(single_case((160, 160, 100), (1, 1, 1)), PlanOverrides(**values), budget)
    batch = values.get("batch_size", 2)
    assert SIZES["tiny"].memory_share < _gb(planned, batch, budget) <= 1
    if "batch_size" not in values:
        assert min(planned.patch_size) >= 40


@pytest.mark.parametrize(("shape", "size"), [((28, 28, 28), "tiny"), ((224, 224), "small")])
def test_the_planned_batch_may_also_be_set(shape, size):
    images = fingerprint([shape] * 1000, [(1.0,) * len(shape)] * 1000)
    budget = Budget(1.0, precision="bf16-mixed", size=size)
    planned = plan(images, PlanOverrides(), budget)
    again = plan(images, PlanOverrides(batch_size=planned.batch_size), budget)
    assert again.patch_size == planned.patch_size == shape


def test_values_that_whole_images_do_not_have_are_refused():
    images = single_case((30, 20), (1, 1))
    with pytest.raises(ValueError, match=r"resize needs positive numbers of voxels, got \[17, 0\]"):
        plan(images, PlanOverrides(resize=(17, 0)))
    with pytest.raises(ValueError, match=r"slice_axis is for label maps"):
        plan(images, PlanOverrides(slice_axis=0))
