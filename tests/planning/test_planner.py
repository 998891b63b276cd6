"""medconv/planning/: spacing, patch, batch and stages of datasets whose plan is known; memory; what a
config says itself.
"""

import itertools
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.memory import step_memory
from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.fingerprint import Fingerprint, check
from medconv.models.unet import UNet
from medconv.planning.memory_model import Budget, step_bytes
from medconv.planning.overrides import PlanOverrides
from medconv.planning.planner import Plan, plan
from medconv.planning.report import table
from medconv.planning.spacing import slice_axis, target_spacing
from medconv.planning.topology import Network
from medconv.training.autotune.trial import Choice, Trial, Work
from medconv.training.losses.segmentation import DiceCrossEntropy

THIN, THICK = 0.62, 3.6
# GB in which our U-Net takes what nnU-Net 2.8.1 plans for 8: its number stands for half precision with a norm
# that keeps more, ours is a count of fp32's bytes. 9.7 to 10.3 give all four of its patches.
NNUNET = Budget(10)
# nnU-Net's own planner on the published fingerprints (median shape and spacing, cases, channels, classes),
# turned to our axes: patch, batch, strides, kernels across the thick slices, channels.
HALVED, PLANE, SAME = (2, 2, 2), (2, 2, 1), (1, 1, 1)
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "hippocampus": ((35, 50, 36), (1.0, 1.0, 1.0), 260, 1, 3, (40, 56, 40), 9, (HALVED,) * 3),
    "heart": ((232, 320, 115), (1.25, 1.25, 1.37), 20, 1, 2, (160, 192, 80), 2, (*(HALVED,) * 4, PLANE)),
    "liver": ((512, 512, 432), (0.7676, 0.7676, 1.0), 131, 1, 3, (128, 128, 128), 2, (HALVED,) * 5),
    "prostate": (
        *((320, 320, 20), (0.625, 0.625, 3.6), 32, 2, 3, (256, 320, 20), 2),
        (PLANE, PLANE, HALVED, PLANE, PLANE, PLANE),  # nnU-Net halves 20 slices twice
    ),
}
# Its 2D configurations: patch, number of stages.
PUBLISHED_2D = {
    "hippocampus": ((40, 56), 4),
    "heart": ((256, 320), 7),
    "liver": ((512, 512), 8),
    "prostate": ((320, 320), 7),
}


def fingerprint(shapes: Any, spacings_mm: Any, channels: int = 1, classes: int = 2) -> Fingerprint:
    dims = len(shapes[0])
    return Fingerprint(
        dims, tuple(shapes), tuple(spacings_mm), ({},) * channels, ((1,) * classes,) * len(shapes)
    )


def one(shape: tuple[int, ...], spacing_mm: tuple[float, ...]) -> Fingerprint:
    return fingerprint([shape], [spacing_mm])


def published(name: str) -> Fingerprint:
    shape, spacing, cases, channels, classes = PUBLISHED[name][:5]
    return fingerprint([shape] * cases, [spacing] * cases, channels, classes)


def reason(found: Plan, what: str) -> str:
    return next(why for name, _, why in found.rows if name == what)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_plans_are_nnunets(name: str) -> None:
    patch, batch, strides = PUBLISHED[name][5:]
    found = plan(published(name), PlanOverrides(max_batch_size=1000), NNUNET)
    assert found.spacing_mm == PUBLISHED[name][1]
    assert (found.patch_size, found.batch_size, found.strides) == (patch, batch, strides)
    late = 2 if name == "prostate" else 0
    assert found.kernel_sizes == ((3, 3, 1),) * late + ((3, 3, 3),) * (len(strides) + 1 - late)
    assert found.channels == (32, 64, 128, 256, 320, 320, 320)[: len(strides) + 1]
    assert found.spatial_dims == 3 and found.slice_axis is None and found.memory_gb == 10


def test_hippocampus_by_default() -> None:
    """The batch differs from nnU-Net's 9: short runs need many steps."""
    found = plan(published("hippocampus"), budget=NNUNET)
    assert (found.patch_size, found.batch_size) == ((40, 56, 40), 4)
    assert reason(found, "batch").startswith("short runs need many steps") and "voxels: 9" in reason(
        found, "batch"
    )


@pytest.mark.parametrize(
    ("name", "patch"), [("heart", (192, 256, 80)), ("liver", (160, 160, 128)), ("prostate", (320, 320, 20))]
)
def test_half_precision_holds_larger_patches_than_nnunet_plans(name: str, patch: tuple[int, ...]) -> None:
    """nnU-Net's estimate is for 8 GB whatever the precision; ours counts bytes, and bf16 halves them."""
    assert plan(published(name), budget=Budget(8, precision="bf16-mixed")).patch_size == patch


@pytest.mark.parametrize("name", PUBLISHED_2D)
def test_published_plans_in_two_dimensions(name: str) -> None:
    """The batch differs from nnU-Net's 366, 40, 12 and 32: at most 12 are planned."""
    patch, stages = PUBLISHED_2D[name]
    found = plan(published(name), PlanOverrides(spatial_dims=2), NNUNET)
    assert (found.spatial_dims, found.slice_axis, found.patch_size) == (2, 2, patch)
    assert found.strides == ((2, 2),) * (stages - 1) and found.kernel_sizes == ((3, 3),) * stages
    assert found.channels == (32, 64, 128, 256, 512, 512, 512, 512)[:stages]
    assert found.batch_size == 12


def test_slices_are_five_percent_of_all_slices() -> None:
    """One volume of 10 slices; 5 % of 100 slices are 5 patches as large as a slice."""
    volumes = fingerprint([(64, 64, 10)] * 10, [(1.0, 1.0, 4.0)] * 10)
    assert plan(volumes, PlanOverrides(spatial_dims=2), NNUNET).batch_size == 5


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_the_order_of_axes_does_not_matter(order: tuple[int, ...]) -> None:
    shape, patch = (36, 50, 35), (40, 56, 40)
    found = plan(one(tuple(shape[i] for i in order), (1, 1, 1)))
    assert found.patch_size == tuple(patch[i] for i in order) and found.strides == ((2,) * 3,) * 3


@pytest.mark.parametrize("thick", range(3))
def test_thick_slices_are_pooled_once_voxels_have_evened_out(thick: int) -> None:
    """20 slices of 3.6 mm, voxels of 0.62 mm: two steps in the plane alone, until voxels are about cubes."""

    def at(across: Any, within: Any) -> tuple[Any, ...]:
        return tuple(across if axis == thick else within for axis in range(3))

    found = plan(one(at(20, 320), at(THICK, THIN)), budget=Budget(24))
    assert found.spacing_mm == at(THICK, THIN) and found.patch_size == at(20, 320)
    assert found.strides == (at(1, 2), at(1, 2), at(2, 2), at(1, 2), at(1, 2), at(1, 2))
    assert found.kernel_sizes == (at(1, 3), at(1, 3), *(at(3, 3),) * 5)


def test_kernels_stay_3_once_they_are_and_are_3_in_the_last_stage() -> None:
    flat = plan(one((256, 256, 8), (1, 1, 1)), budget=NNUNET)
    assert [step[2] for step in flat.strides] == [2, 1, 1, 1, 1, 1] and flat.kernel_sizes == ((3, 3, 3),) * 7
    thick = plan(one((32, 32, 8), (1, 1, 20)))
    assert thick.kernel_sizes == ((3, 3, 1),) * 3 + ((3, 3, 3),)


def test_target_spacing_is_the_median() -> None:
    found = target_spacing(fingerprint([(9, 9, 9)] * 3, [(1, 1, 1), (1.2, 2, 1.5), (5, 3, 1.5)]))
    assert found == (1.2, 2.0, 1.5)


@pytest.mark.parametrize(
    ("spacing", "shape", "expected"),
    [
        ((1.0, 2.0), (99, 99, 20), 5.0),  # median 9, 10th percentile 5
        ((1.0, 3.0), (99, 99, 20), 9.0),  # 9 is not more than 3 times as thick as both others
        ((1.0, 2.0), (99, 60, 20), 9.0),  # 20 slices are not fewer than a third of 60
        ((1.0, 2.9), (99, 99, 20), 5.0),
    ],
)
def test_thick_slices_take_the_tenth_percentile(spacing: Any, shape: Any, expected: float) -> None:
    rows = [(*spacing, float(mm)) for mm in range(4, 15)]
    assert target_spacing(fingerprint([shape] * 11, rows)) == (*spacing, expected)


def test_thin_outliers_do_not_make_the_thick_axis_the_finest() -> None:
    rows = [(1.0, 1.0, 0.2)] * 4 + [(1.0, 1.0, 5.0)] * 6
    assert target_spacing(fingerprint([(99, 99, 9)] * 10, rows)) == (1.0, 1.0, 1.0)


def test_patch_is_the_median_image_in_mm() -> None:
    """50 mm in every case, however many voxels: at 1.25 mm, the median, that is 40."""
    found = plan(fingerprint([(50,) * 3, (25,) * 3, (40,) * 3], [(1,) * 3, (2,) * 3, (1.25,) * 3]))
    assert found.spacing_mm == (1.25,) * 3 and found.patch_size == (40,) * 3


def test_more_memory_never_gives_less_and_every_plan_fits() -> None:
    last = (0, 0)
    for gb in (1, 2, 4, 8, 16, 24, 48):
        found = plan(one((512, 512, 300), (0.8, 0.8, 1)), budget=Budget(gb))
        network = Network(found.strides, found.kernel_sizes, found.channels)
        assert step_bytes(network, found.patch_size, found.batch_size, 1, 2, Budget(gb)) <= gb * 2**30
        size = (prod(found.patch_size), found.batch_size)
        assert size >= last and max(found.patch_size) <= 2 * min(found.patch_size)
        last = size


def test_a_small_view_says_which_grid_would_show_more() -> None:
    found = plan(published("liver"), budget=NNUNET)
    assert "1.9 % of it: data.spacing_mm=[1.8,1.8,2.4] would show more" in reason(found, "patch")
    assert "would show" not in reason(plan(published("prostate"), budget=NNUNET), "patch")


SHAPES = [
    (36, 50, 35),
    (7, 9, 100),
    (320, 320, 11),
    (4, 4, 4),
    (15, 16, 17),
    (600, 20, 5),
    (64, 64),
    (700, 500),
    (5, 9),
]
SPACINGS = [(1.0, 1.0, 1.0), (0.5, 0.5, 7.5), (3.0, 0.4, 1.0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("gb", [1.5, 10])
def test_every_plan_can_be_built(shape: tuple[int, ...], spacing: tuple[float, ...], gb: float) -> None:
    axes = len(shape)
    found = plan(one(shape, spacing[:axes]), budget=Budget(gb))
    steps = np.array(found.strides, int).reshape(-1, axes)
    divisor = steps.prod(axis=0)
    assert len(found.channels) == len(found.kernel_sizes) == len(steps) + 1
    assert all(p % d == 0 and p / d >= 4 for p, d in zip(found.patch_size, divisor, strict=True))
    assert set(steps.ravel()) <= {1, 2} and (steps.max(axis=1, initial=2) == 2).all()
    assert all(k in (1, 3) for kernel in found.kernel_sizes for k in kernel)
    assert all(3 in kernel for kernel in found.kernel_sizes)
    assert all(type(v) is int for v in (*found.patch_size, *found.channels, *itertools.chain(*found.strides)))
    with torch.device("meta"):
        network = UNet(axes, 1, 2, found.channels, found.strides, found.kernel_sizes)
        assert network(torch.zeros(found.batch_size, 1, *found.patch_size)).shape[2:] == found.patch_size


@pytest.mark.parametrize("few", range(3))
def test_volumes_of_very_few_slices_are_taken_slice_by_slice(few: int) -> None:
    def shape(slices: int) -> tuple[int, ...]:
        return tuple(slices if axis == few else 64 for axis in range(3))

    spacing = tuple(5.0 if axis == few else 1.0 for axis in range(3))
    thin = fingerprint([shape(3)] * 9, [spacing] * 9)
    assert slice_axis(thin, None) == few and slice_axis(thin, 3) is None
    found = plan(thin)
    assert (found.spatial_dims, found.slice_axis, found.patch_size) == (2, few, (64, 64))
    assert "so few slices" in reason(found, "dimensions")
    assert plan(fingerprint([shape(4)] * 9, [spacing] * 9)).spatial_dims == 3
    assert plan(thin, PlanOverrides(spatial_dims=3)).spatial_dims == 3


WANTED: dict[str, tuple[Any, Any, str]] = {  # key: given, planned without it, its row
    "spacing_mm": ((1.0, 1.0, 2.0), (1.0, 1.0, 1.0), "spacing"),
    "patch_size": ((32, 32, 32), (40, 56, 40), "patch"),
    "batch_size": (7, 4, "batch"),
    "max_batch_size": (8, None, "batch"),
    "normalisation": ("rescale", None, "normalisation"),
    "strides": (((2, 2, 1), (2, 2, 2)), None, "strides"),
    "kernel_sizes": (((3, 3, 1), (3, 3, 3)), None, "kernels"),
    "channels": ((8, 16, 24), None, "channels"),
    "spatial_dims": (2, 3, "dimensions"),
}


@pytest.mark.parametrize("key", WANTED)
def test_what_is_wanted_is_kept_and_its_row_names_the_key(key: str) -> None:
    given, planned, row = WANTED[key]
    found = plan(published("hippocampus"), PlanOverrides(**{key: given}), NNUNET)
    kept = {"max_batch_size": "batch_size"}.get(key, key)
    assert getattr(found, kept) == (("rescale",) if key == "normalisation" else given)
    group = "plan" if key in ("max_batch_size", "strides", "kernel_sizes", "channels") else "data"
    assert reason(found, row).startswith(f"{group}.{key}")
    before = plan(published("hippocampus"), budget=NNUNET)
    assert reason(before, row) != reason(found, row) and planned in (None, getattr(before, kept))


def test_what_is_wanted_bounds_the_stages() -> None:
    assert len(plan(published("hippocampus"), PlanOverrides(max_stages=2)).strides) == 1
    assert plan(published("hippocampus"), PlanOverrides(max_stages=1)).strides == ()
    assert len(plan(published("hippocampus"), PlanOverrides(channels=(8, 16))).strides) == 1
    assert plan(published("hippocampus"), PlanOverrides(strides=(2, (1, 2, 2)))).strides == (
        (2, 2, 2),
        (1, 2, 2),
    )


def test_a_given_spacing_changes_the_patch_with_it() -> None:
    found = plan(one((36, 50, 35), (1, 1, 1)), PlanOverrides(spacing_mm=[2, 1, 1]))
    assert found.patch_size == (20, 56, 40)  # the image has 18 voxels of 2 mm; they are halved one time less
    assert found.strides == ((1, 2, 2), (2, 2, 2), (2, 2, 2)) and found.kernel_sizes[0] == (1, 3, 3)


def test_a_given_patch_is_halved_where_it_is_even() -> None:
    found = plan(one((36, 50, 35), (1, 1, 1)), PlanOverrides(patch_size=[45, 60, 16]))
    assert found.patch_size == (45, 60, 16) and found.strides == ((1, 2, 2), (1, 2, 2))
    big = plan(one((36, 50, 35), (1, 1, 1)), PlanOverrides(patch_size=[256, 256, 256]), Budget(4))
    assert (big.batch_size, reason(big, "batch")) == (1, "memory holds no more")  # asked for, so only said


def test_a_given_batch_shrinks_the_patch() -> None:
    many = plan(published("liver"), PlanOverrides(batch_size=8), NNUNET)
    assert many.batch_size == 8 and prod(many.patch_size) < prod(PUBLISHED["liver"][5]) / 3


def test_a_batch_is_never_larger_than_allowed() -> None:
    """Six cases of 32^3 are less than 20 patches: 5 % of their voxels are no patch at all."""
    few = fingerprint([(32,) * 3] * 6, [(1.0,) * 3] * 6)
    assert (plan(few).batch_size, reason(plan(few), "batch")) == (2, "the least; 5 % of all voxels: 0")
    assert plan(few, PlanOverrides(max_batch_size=1)).batch_size == 1


def test_where_one_is_allowed_the_patch_is_not_shrunk_for_two() -> None:
    single, pair = (plan(published("liver"), PlanOverrides(max_batch_size=n), NNUNET) for n in (1, 2))
    assert single.batch_size == 1 and prod(single.patch_size) > prod(pair.patch_size)


def test_slices_are_counted_as_they_are() -> None:
    """9 volumes of 10 slices, most thicker than the target spacing, on which they would be 40; 5 % of 90
    slices are 4.5.
    """
    volumes = fingerprint([(64, 64, 10)] * 9, [(1.0, 1.0, mm) for mm in (*[2.0] * 4, *[8.0] * 5)])
    assert target_spacing(volumes)[2] == 2.0
    assert plan(volumes, PlanOverrides(spatial_dims=2), NNUNET).batch_size == 4


def test_a_patch_beyond_the_budget_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    plan(published("liver"), PlanOverrides(patch_size=[128, 128, 128]), NNUNET)
    assert not caplog.records
    plan(published("liver"), PlanOverrides(patch_size=[512, 512, 384]), NNUNET)
    (record,) = caplog.records
    assert "data.patch_size=[512,512,384] in a batch of 1 takes some" in record.getMessage()
    assert "GB, the budget is 10 (" in record.getMessage()


@pytest.mark.parametrize(
    ("mm", "planned"), [(0.76761, 0.7676), (12.34567, 12.3457), (0.00025, 0.00025), (4.12345e-6, 4.123e-6)]
)
def test_spacings_keep_four_digits(mm: float, planned: float) -> None:
    assert target_spacing(one((64, 64, 64), (mm,) * 3)) == (planned,) * 3


def test_where_two_do_not_fit_there_is_one() -> None:
    data = one((16, 16, 16), (1, 1, 1))
    found = plan(data)
    network = Network(found.strides, found.kernel_sizes, found.channels)
    first, second = (step_bytes(network, (16, 16, 16), n, 1, 2, Budget()) / 2**30 for n in (1, 2))
    assert plan(data, budget=Budget(second)).batch_size == 2
    tight = plan(data, budget=Budget(0.99 * second))
    assert tight.patch_size == (16, 16, 16)
    assert (tight.batch_size, reason(tight, "batch")) == (1, "memory holds no more")
    assert plan(data, budget=Budget(first)).batch_size == 1
    with pytest.raises(ValueError, match=r"the smallest patch, 16 x 16 x 16 voxels, in a batch of 1"):
        plan(data, budget=Budget(0.99 * first))


def test_memory_does_not_take_stages_that_were_asked_for() -> None:
    found = plan(published("liver"), PlanOverrides(channels=(8, 16, 24, 32)), Budget(0.2))
    assert len(found.channels) == 4 and min(found.patch_size) < 64
    with pytest.raises(ValueError, match=r"the smallest patch, 32 x 32 x 16 voxels, in a batch of 1"):
        plan(published("liver"), PlanOverrides(channels=(8, 16, 24, 32)), Budget(0.001))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"max_stages": 0}, r"plan\.max_stages must be 1 or more, or null, got 0"),
        ({"max_batch_size": 0}, r"plan\.max_batch_size must be 1 or more, or null, got 0"),
        ({"batch_size": 0}, r"data\.batch_size must be at least 1, got 0"),
        (
            {"strides": [[2, 2]]},
            r"plan\.strides needs 3 whole numbers of 1 or more for each step.*got \[\[2, 2\]\]",
        ),
        ({"strides": [0]}, r"plan\.strides needs 3 whole numbers"),
        ({"strides": "fast"}, r"plan\.strides needs 3 whole numbers.*got fast"),
        ({"strides": [[2, 2, 1.5]]}, r"plan\.strides needs 3 whole numbers"),
        ({"strides": [2], "patch_size": [15, 16, 16]}, r"data\.patch_size must be divisible by \(2, 2, 2\)"),
        (
            {"kernel_sizes": [3, 3, 3, [3, 3, 2]]},
            r"plan\.kernel_sizes needs 3 odd numbers for each of 4 stages",
        ),
        ({"kernel_sizes": [3, 3, 3, 3, 3]}, r"plan\.kernel_sizes needs 3 odd numbers for each of 4 stages"),
        ({"kernel_sizes": 3}, r"plan\.kernel_sizes needs 3 odd numbers for each of 4 stages, got 3"),
        (
            {"max_stages": 2, "strides": [2, 2, 2]},
            r"plan\.strides=\[2, 2, 2\] makes 4 stages, plan\.max_stages allows 2",
        ),
        (
            {"channels": [8] * 9},
            r"plan\.channels needs one number of 1 or more for each of 4 stages, got \[8, 8",
        ),
        ({"channels": [8, 0]}, r"plan\.channels needs one number of 1 or more for each of 2 stages"),
        ({"normalisation": ["ct", "ct"]}, r"data\.normalisation needs one name"),
    ],
)
def test_nonsense_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(one((36, 50, 35), (1, 1, 1)), PlanOverrides(**wanted))


@pytest.mark.parametrize(
    ("key", "axes"), [("spacing_mm", 3), ("patch_size", 3), ("spacing_mm", 2), ("patch_size", 2)]
)
@pytest.mark.parametrize("wrong", ["too few", "too many", "zero", "negative"])
def test_bad_spacing_and_patch(key: str, axes: int, wrong: str) -> None:
    good = [16] * axes
    values = {
        "too few": good[1:],
        "too many": [*good, 16],
        "zero": [0, *good[1:]],
        "negative": [*good[1:], -1],
    }[wrong]
    data = one((36, 50, 35)[:axes], (1.0,) * axes)
    with pytest.raises(
        ValueError, match=rf"data\.{key} needs {axes} positive numbers, one per spatial axis, got \["
    ):
        plan(data, PlanOverrides(**{key: values}))


def test_too_little_memory_says_how_little() -> None:
    words = (
        r"plan\.memory_gb: the smallest patch, 16 x 16 x 16 voxels, in a batch of 1 takes some "
        r"0\.\d+ GB, the budget is 0.001"
    )
    with pytest.raises(ValueError, match=words):
        plan(published("liver"), budget=Budget(0.001))
    with pytest.raises(ValueError, match=r"in a batch of 500 takes some"):
        plan(published("liver"), PlanOverrides(batch_size=500), Budget(0.1))
    with pytest.raises(ValueError, match=r"plan\.memory_gb must be a positive number of GB, got -1"):
        Budget(-1)


def test_a_table_has_every_value_with_its_reason() -> None:
    found = plan(
        published("prostate"),
        budget=Budget(10, "measured", "bf16-mixed", "blocks"),
        modalities=("MRI", "ADC"),
    )
    lines = table(found.rows).splitlines()
    assert [line.split()[0] for line in lines] == [
        *(
            "dimensions",
            "spacing",
            "patch",
            "batch",
            "stages",
            "strides",
            "kernels",
            "channels",
            "normalisation",
            "memory",
        )
    ]
    assert max(map(len, lines)) < 160 and all(line.split("  ")[-1] for line in lines)
    assert "2x2x1 (2), 2x2x2, 2x2x1 (3)" in lines[5] and "modality MRI, ADC" in lines[8]
    assert "in bf16-mixed, activation_checkpointing=blocks; the budget: measured" in lines[9]


@pytest.mark.parametrize(
    ("patch", "channels", "batch", "classes", "choice"),
    [
        ((32, 32, 32), (16, 32, 64), 1, 3, Choice()),
        ((24, 32, 16), (16, 32), 3, 9, Choice()),
        ((32, 32, 32), (16, 32, 64), 2, 3, Choice("bf16-mixed", channels_last=True, fast_norm=True)),
        (
            (32, 32, 32),
            (16, 32, 64),
            2,
            3,
            Choice("bf16-mixed", True, True, activation_checkpointing="pointwise"),
        ),
        ((32, 32, 32), (16, 32, 64), 2, 3, Choice("32-true", True, True, activation_checkpointing="blocks")),
        ((96, 96), (16, 32, 64, 128), 4, 2, Choice()),
    ],
    ids=str,
)
def test_the_estimate_is_near_what_a_step_takes(
    patch: tuple[int, ...], channels: tuple[int, ...], batch: int, classes: int, choice: Choice
) -> None:
    """Without the weights, their gradients and moments, which `step_memory` finds there already."""
    strides = ((2,) * len(patch),) * (len(channels) - 1)
    kernels = ((3,) * len(patch),) * len(channels)
    torch.manual_seed(0)
    network = UNet(len(patch), 1, classes, channels, strides)
    image, label = torch.randn(batch, 1, *patch), torch.randint(classes, (batch, 1, *patch))
    trial = Trial(
        Work(network, DiceCrossEntropy(), partial(torch.optim.AdamW, lr=1e-3), image, label), choice
    )
    trial.step()
    measured = step_memory(trial.forward, trial.step, torch.device("cpu"))["peak_bytes"]
    budget = Budget(8, precision=choice.precision, activation_checkpointing=choice.activation_checkpointing)
    weights = 16 * sum(p.numel() for p in network.parameters())
    estimate = step_bytes(Network(strides, kernels, channels), patch, batch, 1, classes, budget) - weights
    assert estimate == pytest.approx(measured, rel=0.15), f"{estimate / measured - 1:+.3f}"


@pytest.mark.realdata
def test_a_spinal_cord_is_not_pooled_across_its_slices(realdata: Path) -> None:
    """0.5 x 0.5 x 7.5 mm, 11 slices."""
    root = realdata / "spinalcord_t2s"
    if not root.is_dir():
        pytest.skip(f"{root} is absent")
    case = Case("cord", (root / "image.nii.gz",), root / "label.nii.gz")
    found = plan(
        check(Dataset("cord", (case,), ("background", "grey matter"), ("MRI",)), 1).fingerprint, budget=NNUNET
    )
    (thick,) = [axis for axis, mm in enumerate(found.spacing_mm) if mm > 5]
    assert [step[thick] for step in found.strides] == [1] * 6
    assert [kernel[thick] for kernel in found.kernel_sizes] == [1, 1, 1, 3, 3, 3, 3]
    assert sorted(found.patch_size) == [11, 320, 320]
