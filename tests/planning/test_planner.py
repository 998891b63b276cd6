"""medconv/planning/planner.py: patch, batch and stages of datasets whose plan is known; values of the config
are kept.
"""

import itertools
import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from helpers.plans import NNUNET, PUBLISHED, fingerprint, published, reason, single_case

from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.check import check
from medconv.planning.limits import SIZES, PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.spacing import median_shape, target_spacing
from medconv.planning.topology import GB, Budget, Network, step_bytes

# nnU-Net's 2D configurations: patch, number of stages.
PUBLISHED_2D = {
    "hippocampus": ((40, 56), 4),
    "heart": ((256, 320), 7),
    "liver": ((512, 512), 8),
    "prostate": ((320, 320), 7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_of_published_fingerprints_equal_those_of_nnunet(name):
    patch, batch, strides = PUBLISHED[name][5:]
    planned = plan(published(name), PlanOverrides(max_batch_size=1000), NNUNET)
    assert planned.spacing_mm == PUBLISHED[name][1]
    assert (planned.patch_size, planned.batch_size, planned.strides) == (patch, batch, strides)
    num_flat = 2 if name == "prostate" else 0  # stages with 1 across the thick slices
    assert planned.kernel_sizes == ((3, 3, 1),) * num_flat + ((3, 3, 3),) * (len(strides) + 1 - num_flat)
    assert planned.channels == (32, 64, 128, 256, 320, 320, 320)[: len(strides) + 1]
    assert planned.spatial_dims == 3 and planned.slice_axis is None and planned.memory_gb == 10


def test_the_default_batch_of_the_hippocampus_is_small():
    """The batch differs from nnU-Net's 9: short runs need many steps."""
    planned = plan(published("hippocampus"), budget=NNUNET)
    assert (planned.patch_size, planned.batch_size) == ((40, 56, 40), 4)
    why = reason(planned, "batch")
    assert why.startswith("short runs need many steps; other limits: memory") and why.endswith("voxels: 9")


@pytest.mark.parametrize(
    ("name", "patch"), [("heart", (192, 256, 80)), ("liver", (160, 160, 128)), ("prostate", (320, 320, 20))]
)
def test_half_precision_holds_larger_patches_than_nnunet_plans(name, patch):
    """nnU-Net's estimate is for 8 GB whatever the precision; ours counts bytes, and bf16 halves them."""
    assert plan(published(name), budget=Budget(8, precision="bf16-mixed")).patch_size == patch


@pytest.mark.parametrize("name", PUBLISHED_2D)
def test_2d_plans_of_published_fingerprints_equal_those_of_nnunet(name):
    """The batch differs from nnU-Net's 366, 40, 12 and 32: at most 12 are planned."""
    patch, stages = PUBLISHED_2D[name]
    planned = plan(published(name), PlanOverrides(spatial_dims=2), NNUNET)
    assert (planned.spatial_dims, planned.slice_axis, planned.patch_size) == (2, 2, patch)
    assert planned.strides == ((2, 2),) * (stages - 1) and planned.kernel_sizes == ((3, 3),) * stages
    assert planned.channels == (32, 64, 128, 256, 512, 512, 512, 512)[:stages]
    assert planned.batch_size == 12


def test_a_batch_of_slices_has_at_most_five_percent_of_them():
    """One volume of 10 slices; 5 % of 100 slices are 5 patches as large as a slice."""
    volumes = fingerprint([(64, 64, 10)] * 10, [(1.0, 1.0, 4.0)] * 10)
    assert plan(volumes, PlanOverrides(spatial_dims=2), NNUNET).batch_size == 5


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_the_order_of_axes_does_not_matter(order):
    shape, patch = (36, 50, 35), (40, 56, 40)
    planned = plan(single_case(tuple(shape[i] for i in order), (1, 1, 1)))
    assert planned.patch_size == tuple(patch[i] for i in order) and planned.strides == ((2,) * 3,) * 3


def test_the_patch_is_the_median_image_in_mm():
    """50 mm in every case, however many voxels: at 1.25 mm, the median, that is 40."""
    planned = plan(fingerprint([(50,) * 3, (25,) * 3, (40,) * 3], [(1,) * 3, (2,) * 3, (1.25,) * 3]))
    assert planned.spacing_mm == (1.25,) * 3 and planned.patch_size == (40,) * 3


CONFIGURED = {  # key: value of the config, planned without it, its row
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


@pytest.mark.parametrize("key", CONFIGURED)
def test_values_of_the_config_are_kept_and_their_row_names_the_argument(key):
    value, default, row = CONFIGURED[key]
    planned = plan(published("hippocampus"), PlanOverrides(**{key: value}), NNUNET)
    attribute = {"max_batch_size": "batch_size"}.get(key, key)
    assert getattr(planned, attribute) == (("rescale",) if key == "normalisation" else value)
    assert reason(planned, row).startswith(key)
    without = plan(published("hippocampus"), budget=NNUNET)
    assert reason(without, row) != reason(planned, row) and default in (None, getattr(without, attribute))


def test_values_of_the_config_bound_the_stages():
    assert len(plan(published("hippocampus"), PlanOverrides(max_stages=2)).strides) == 1
    assert plan(published("hippocampus"), PlanOverrides(max_stages=1)).strides == ()
    assert len(plan(published("hippocampus"), PlanOverrides(channels=(8, 16))).strides) == 1
    assert plan(published("hippocampus"), PlanOverrides(strides=(2, (1, 2, 2)))).strides == (
        (2, 2, 2),
        (1, 2, 2),
    )


def test_a_spacing_of_the_config_changes_the_patch():
    planned = plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(spacing_mm=[2, 1, 1]))
    assert planned.patch_size == (
        20,
        56,
        40,
    )  # the image has 18 voxels of 2 mm; they are halved one time less
    assert planned.strides == ((1, 2, 2), (2, 2, 2), (2, 2, 2)) and planned.kernel_sizes[0] == (1, 3, 3)


def test_a_patch_of_the_config_may_exceed_the_budget():
    big = plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(patch_size=[256, 256, 256]), Budget(4))
    assert (big.batch_size, reason(big, "batch")) == (1, "memory holds no more")


def test_a_batch_size_of_the_config_shrinks_the_patch():
    many = plan(published("liver"), PlanOverrides(batch_size=8), NNUNET)
    assert many.batch_size == 8 and prod(many.patch_size) < prod(PUBLISHED["liver"][5]) / 3


def test_slices_are_counted_before_resampling():
    """9 volumes of 10 slices, most thicker than the target spacing, on which they would be 40; 5 % of 90
    slices are 4.5.
    """
    volumes = fingerprint([(64, 64, 10)] * 9, [(1.0, 1.0, mm) for mm in (*[2.0] * 4, *[8.0] * 5)])
    assert target_spacing(volumes)[2] == 2.0
    assert plan(volumes, PlanOverrides(spatial_dims=2), NNUNET).batch_size == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strides": [2], "patch_size": [15, 16, 16]}, r"patch_size must be divisible by \(2, 2, 2\)"),
        ({"max_stages": 2, "strides": [2, 2, 2]}, r"strides=\[2, 2, 2\] makes 4 stages, max_stages allows 2"),
        ({"normalisation": ["ct", "ct"]}, r"normalisation needs one name"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(**values))


@pytest.mark.realdata
def test_a_spinal_cord_is_not_halved_across_its_slices(realdata):
    """0.5 x 0.5 x 7.5 mm, 11 slices."""
    root = realdata / "spinalcord_t2s"
    if not root.is_dir():
        pytest.skip(f"{root} is absent")
    case = Case("cord", (root / "image.nii.gz",), root / "label.nii.gz")
    cord = Dataset("cord", (case,), ("background", "grey matter"), ("MRI",))
    planned = plan(check(cord, 1).fingerprint, budget=NNUNET)
    (thick,) = [axis for axis, mm in enumerate(planned.spacing_mm) if mm > 5]
    assert [step[thick] for step in planned.strides] == [1] * 6
    assert [kernel[thick] for kernel in planned.kernel_sizes] == [1, 1, 1, 3, 3, 3, 3]
    assert sorted(planned.patch_size) == [11, 320, 320]


def test_the_patch_is_what_the_network_can_divide():
    data = single_case((35, 50, 36), (1, 1, 1))
    planned = plan(data, PlanOverrides(divisible_by=32))
    assert planned.patch_size == (64, 64, 64) and "to multiples of 32, for the network" in reason(
        planned, "patch"
    )
    assert plan(published("liver"), PlanOverrides(divisible_by=48), NNUNET).patch_size == (96, 144, 144)
    with pytest.raises(
        ValueError, match=r"divisible by \(32, 32, 32\) \(divisible_by=32\), got \[40, 64, 64\]"
    ):
        plan(data, PlanOverrides(divisible_by=32, patch_size=(40, 64, 64)))


def drawn(rng):
    """1 to 5 cases of one spacing, up to 20 times as coarse along one axis, with structures of 1 to 50 voxels."""
    dims = rng.choice([2, 3])
    spacing = [10 ** rng.uniform(-1, 0.5)] * dims
    spacing[rng.randrange(dims)] *= rng.choice([1.0, rng.uniform(1, 20)])
    num_cases = rng.randint(1, 5)
    shapes = [tuple(rng.randint(16, 300) for _ in range(dims)) for _ in range(num_cases)]
    classes = rng.choice([2, 5, 120])
    cases = fingerprint(shapes, [tuple(spacing)] * num_cases, classes=classes)
    voxels = [10 ** rng.uniform(0, 1.7) for _ in range(classes - 1)]
    thickness_mm = tuple(tuple(n * mm for mm in spacing) for n in voxels)
    return replace(cases, thickness_mm=thickness_mm)


@pytest.mark.parametrize("seed", range(12))
def test_every_plan_fits_its_images_and_its_budget(seed):
    rng = random.Random(seed)
    images = drawn(rng)
    budget = Budget(rng.choice([1.0, 8.0]), precision="bf16-mixed", size=rng.choice(list(SIZES)))
    made = plan(images, budget=budget)
    network = Network(made.strides, made.kernel_sizes, made.channels)
    divisor = np.array(network.divisor())
    patch = np.array(made.patch_size)
    assert all(patch % divisor == 0)
    assert all(patch < np.maximum(median_shape(images, made.spacing_mm), 4) + divisor)
    num_classes = len(images.class_voxels[0])
    assert (
        step_bytes(network, made.patch_size, made.batch_size, 1, num_classes, budget) <= budget.memory_gb * GB
    )
    spacing = np.array(made.spacing_mm)
    native = np.array(target_spacing(images))
    assert all(spacing >= native)
    thinnest = np.min(images.thickness_mm, axis=0)
    assert all((spacing == native) | (thinnest >= 4 * spacing))
    left = " x ".join(map(str, patch // divisor))
    assert f"the coarsest stage has {left} voxels" in reason(made, "strides")
    assert prod(patch // divisor) >= 1 and plan(images, budget=budget) == made
