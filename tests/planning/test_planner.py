"""medconv/planning/planner.py: patch, batch and stages of datasets whose plan is known; values of the config
are kept; every plan fits the memory.
"""

import itertools
from math import prod
from pathlib import Path
from typing import Any

import pytest
from helpers.plans import NNUNET, PUBLISHED, fingerprint, published, reason, single_case

from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.fingerprint import Fingerprint, check
from medconv.planning.memory_model import Budget, step_bytes
from medconv.planning.overrides import PlanOverrides
from medconv.planning.planner import Plan, plan
from medconv.planning.spacing import target_spacing
from medconv.planning.topology import Network

# nnU-Net's 2D configurations: patch, number of stages.
PUBLISHED_2D = {
    "hippocampus": ((40, 56), 4),
    "heart": ((256, 320), 7),
    "liver": ((512, 512), 8),
    "prostate": ((320, 320), 7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_of_published_fingerprints_equal_those_of_nnunet(name: str) -> None:
    patch, batch, strides = PUBLISHED[name][5:]
    planned = plan(published(name), PlanOverrides(max_batch_size=1000), NNUNET)
    assert planned.spacing_mm == PUBLISHED[name][1]
    assert (planned.patch_size, planned.batch_size, planned.strides) == (patch, batch, strides)
    num_flat = 2 if name == "prostate" else 0  # stages with 1 across the thick slices
    assert planned.kernel_sizes == ((3, 3, 1),) * num_flat + ((3, 3, 3),) * (len(strides) + 1 - num_flat)
    assert planned.channels == (32, 64, 128, 256, 320, 320, 320)[: len(strides) + 1]
    assert planned.spatial_dims == 3 and planned.slice_axis is None and planned.memory_gb == 10


def test_the_default_batch_of_the_hippocampus_is_small() -> None:
    """The batch differs from nnU-Net's 9: short runs need many steps."""
    planned = plan(published("hippocampus"), budget=NNUNET)
    assert (planned.patch_size, planned.batch_size) == ((40, 56, 40), 4)
    why = reason(planned, "batch")
    assert why.startswith("short runs need many steps; other limits: memory") and why.endswith("voxels: 9")


@pytest.mark.parametrize(
    ("name", "patch"), [("heart", (192, 256, 80)), ("liver", (160, 160, 128)), ("prostate", (320, 320, 20))]
)
def test_half_precision_holds_larger_patches_than_nnunet_plans(name: str, patch: tuple[int, ...]) -> None:
    """nnU-Net's estimate is for 8 GB whatever the precision; ours counts bytes, and bf16 halves them."""
    assert plan(published(name), budget=Budget(8, precision="bf16-mixed")).patch_size == patch


@pytest.mark.parametrize("name", PUBLISHED_2D)
def test_2d_plans_of_published_fingerprints_equal_those_of_nnunet(name: str) -> None:
    """The batch differs from nnU-Net's 366, 40, 12 and 32: at most 12 are planned."""
    patch, stages = PUBLISHED_2D[name]
    planned = plan(published(name), PlanOverrides(spatial_dims=2), NNUNET)
    assert (planned.spatial_dims, planned.slice_axis, planned.patch_size) == (2, 2, patch)
    assert planned.strides == ((2, 2),) * (stages - 1) and planned.kernel_sizes == ((3, 3),) * stages
    assert planned.channels == (32, 64, 128, 256, 512, 512, 512, 512)[:stages]
    assert planned.batch_size == 12


def test_a_batch_of_slices_has_at_most_five_percent_of_them() -> None:
    """One volume of 10 slices; 5 % of 100 slices are 5 patches as large as a slice."""
    volumes = fingerprint([(64, 64, 10)] * 10, [(1.0, 1.0, 4.0)] * 10)
    assert plan(volumes, PlanOverrides(spatial_dims=2), NNUNET).batch_size == 5


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_the_order_of_axes_does_not_matter(order: tuple[int, ...]) -> None:
    shape, patch = (36, 50, 35), (40, 56, 40)
    planned = plan(single_case(tuple(shape[i] for i in order), (1, 1, 1)))
    assert planned.patch_size == tuple(patch[i] for i in order) and planned.strides == ((2,) * 3,) * 3


def test_the_patch_is_the_median_image_in_mm() -> None:
    """50 mm in every case, however many voxels: at 1.25 mm, the median, that is 40."""
    planned = plan(fingerprint([(50,) * 3, (25,) * 3, (40,) * 3], [(1,) * 3, (2,) * 3, (1.25,) * 3]))
    assert planned.spacing_mm == (1.25,) * 3 and planned.patch_size == (40,) * 3


def test_more_memory_never_gives_less_and_every_plan_fits() -> None:
    previous = (0, 0)
    for gb in (1, 2, 4, 8, 16, 24, 48):
        planned = plan(single_case((512, 512, 300), (0.8, 0.8, 1)), budget=Budget(gb))
        network = Network(planned.strides, planned.kernel_sizes, planned.channels)
        assert step_bytes(network, planned.patch_size, planned.batch_size, 1, 2, Budget(gb)) <= gb * 2**30
        size = (prod(planned.patch_size), planned.batch_size)
        assert size >= previous and max(planned.patch_size) <= 2 * min(planned.patch_size)
        previous = size


CONFIGURED: dict[str, tuple[Any, Any, str]] = {  # key: value of the config, planned without it, its row
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
def test_values_of_the_config_are_kept_and_their_row_names_the_key(key: str) -> None:
    value, default, row = CONFIGURED[key]
    planned = plan(published("hippocampus"), PlanOverrides(**{key: value}), NNUNET)
    attribute = {"max_batch_size": "batch_size"}.get(key, key)
    assert getattr(planned, attribute) == (("rescale",) if key == "normalisation" else value)
    group = "plan" if key in ("max_batch_size", "strides", "kernel_sizes", "channels") else "data"
    assert reason(planned, row).startswith(f"{group}.{key}")
    without = plan(published("hippocampus"), budget=NNUNET)
    assert reason(without, row) != reason(planned, row) and default in (None, getattr(without, attribute))


def test_values_of_the_config_bound_the_stages() -> None:
    assert len(plan(published("hippocampus"), PlanOverrides(max_stages=2)).strides) == 1
    assert plan(published("hippocampus"), PlanOverrides(max_stages=1)).strides == ()
    assert len(plan(published("hippocampus"), PlanOverrides(channels=(8, 16))).strides) == 1
    assert plan(published("hippocampus"), PlanOverrides(strides=(2, (1, 2, 2)))).strides == (
        (2, 2, 2),
        (1, 2, 2),
    )


def test_a_spacing_of_the_config_changes_the_patch() -> None:
    planned = plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(spacing_mm=[2, 1, 1]))
    assert planned.patch_size == (
        20,
        56,
        40,
    )  # the image has 18 voxels of 2 mm; they are halved one time less
    assert planned.strides == ((1, 2, 2), (2, 2, 2), (2, 2, 2)) and planned.kernel_sizes[0] == (1, 3, 3)


def test_a_patch_of_the_config_may_exceed_the_budget() -> None:
    big = plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(patch_size=[256, 256, 256]), Budget(4))
    assert (big.batch_size, reason(big, "batch")) == (1, "memory holds no more")


def test_a_batch_size_of_the_config_shrinks_the_patch() -> None:
    many = plan(published("liver"), PlanOverrides(batch_size=8), NNUNET)
    assert many.batch_size == 8 and prod(many.patch_size) < prod(PUBLISHED["liver"][5]) / 3


def test_a_batch_is_never_larger_than_the_maximum() -> None:
    """Six cases of 32^3 are less than 20 patches: 5 % of their voxels are no patch at all."""
    few = fingerprint([(32,) * 3] * 6, [(1.0,) * 3] * 6)
    assert (plan(few).batch_size, reason(plan(few), "batch")) == (2, "the least; 5 % of all voxels: 0")
    assert plan(few, PlanOverrides(max_batch_size=1)).batch_size == 1


def test_with_a_maximum_batch_of_one_the_patch_is_not_shrunk_for_two() -> None:
    single, pair = (plan(published("liver"), PlanOverrides(max_batch_size=n), NNUNET) for n in (1, 2))
    assert single.batch_size == 1 and prod(single.patch_size) > prod(pair.patch_size)


def test_slices_are_counted_before_resampling() -> None:
    """9 volumes of 10 slices, most thicker than the target spacing, on which they would be 40; 5 % of 90
    slices are 4.5.
    """
    volumes = fingerprint([(64, 64, 10)] * 9, [(1.0, 1.0, mm) for mm in (*[2.0] * 4, *[8.0] * 5)])
    assert target_spacing(volumes)[2] == 2.0
    assert plan(volumes, PlanOverrides(spatial_dims=2), NNUNET).batch_size == 4


def test_a_patch_beyond_the_budget_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plan(published("liver"), PlanOverrides(patch_size=[128, 128, 128]), NNUNET)
    assert not caplog.records
    plan(published("liver"), PlanOverrides(patch_size=[512, 512, 384]), NNUNET)
    (record,) = caplog.records
    assert "patch_size=[512,512,384] in a batch of 1 takes some" in record.getMessage()
    assert "GB, the budget is 10 (" in record.getMessage()
    plan(published("liver"), PlanOverrides(patch_size=[512, 512, 384]), NNUNET, warns=False)
    assert len(caplog.records) == 1


def test_the_batch_is_one_if_two_samples_do_not_fit() -> None:
    data = single_case((16, 16, 16), (1, 1, 1))
    planned = plan(data)
    network = Network(planned.strides, planned.kernel_sizes, planned.channels)
    first, second = (step_bytes(network, (16, 16, 16), n, 1, 2, Budget()) / 2**30 for n in (1, 2))
    assert plan(data, budget=Budget(second)).batch_size == 2
    tight = plan(data, budget=Budget(0.99 * second))
    assert tight.patch_size == (16, 16, 16)
    assert (tight.batch_size, reason(tight, "batch")) == (1, "memory holds no more")
    assert plan(data, budget=Budget(first)).batch_size == 1
    with pytest.raises(ValueError, match=r"the smallest patch, 16 x 16 x 16 voxels, in a batch of 1"):
        plan(data, budget=Budget(0.99 * first))


def test_a_small_budget_does_not_remove_stages_of_the_config() -> None:
    planned = plan(published("liver"), PlanOverrides(channels=(8, 16, 24, 32)), Budget(0.2))
    assert len(planned.channels) == 4 and min(planned.patch_size) < 64
    with pytest.raises(ValueError, match=r"the smallest patch, 32 x 32 x 16 voxels, in a batch of 1"):
        plan(published("liver"), PlanOverrides(channels=(8, 16, 24, 32)), Budget(0.001))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strides": [2], "patch_size": [15, 16, 16]}, r"patch_size must be divisible by \(2, 2, 2\)"),
        (
            {"max_stages": 2, "strides": [2, 2, 2]},
            r"strides=\[2, 2, 2\] makes 4 stages, max_stages allows 2",
        ),
        ({"normalisation": ["ct", "ct"]}, r"normalisation needs one name"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(single_case((36, 50, 35), (1, 1, 1)), PlanOverrides(**values))


@pytest.mark.parametrize(
    ("key", "axes"), [("spacing_mm", 3), ("patch_size", 3), ("spacing_mm", 2), ("patch_size", 2)]
)
@pytest.mark.parametrize("fault", ["too few", "too many", "zero", "negative"])
def test_a_spacing_or_patch_without_one_positive_number_per_axis_is_refused(
    key: str, axes: int, fault: str
) -> None:
    good = [16] * axes
    values = {
        "too few": good[1:],
        "too many": [*good, 16],
        "zero": [0, *good[1:]],
        "negative": [*good[1:], -1],
    }[fault]
    data = single_case((36, 50, 35)[:axes], (1.0,) * axes)
    with pytest.raises(
        ValueError, match=rf"{key} needs {axes} positive numbers, one per spatial axis, got \["
    ):
        plan(data, PlanOverrides(**{key: values}))


def test_a_budget_too_small_is_refused_with_the_memory_needed() -> None:
    words = (
        r"memory_gb: the smallest patch, 16 x 16 x 16 voxels, in a batch of 1 takes some "
        r"0\.\d+ GB, the budget is 0.001"
    )
    with pytest.raises(ValueError, match=words):
        plan(published("liver"), budget=Budget(0.001))
    with pytest.raises(ValueError, match=r"in a batch of 500 takes some"):
        plan(published("liver"), PlanOverrides(batch_size=500), Budget(0.1))


@pytest.mark.parametrize(
    ("shape", "batch", "stages"), [((28, 28), 128, 3), ((28, 28, 28), 32, 3), ((224, 224), 16, 6)]
)
def test_image_level_plans_take_whole_images(shape: tuple[int, ...], batch: int, stages: int) -> None:
    dims = len(shape)
    images = Fingerprint(
        dims, (shape,) * 5000, ((1.0,) * dims,) * 5000, ({"mean": 0.0, "std": 1.0},), ((),) * 5000
    )

    def planned(**values: Any) -> Plan:
        return plan(images, PlanOverrides(image_level=True, **values), Budget(8.0), ("grey",), 2)

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


@pytest.mark.realdata
def test_a_spinal_cord_is_not_halved_across_its_slices(realdata: Path) -> None:
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


def test_the_patch_is_what_the_network_can_divide() -> None:
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


def test_residual_blocks_take_memory_and_bound_the_stages() -> None:
    blocks = [1, 3, 4, 6, 6, 6]
    residual = plan(published("liver"), PlanOverrides(residual_blocks=blocks, decoder_convs=1), NNUNET)
    assert prod(residual.patch_size) < prod(plan(published("liver"), budget=NNUNET).patch_size)
    assert len(plan(published("liver"), PlanOverrides(residual_blocks=[1, 3]), NNUNET).channels) == 2
    with pytest.raises(ValueError, match=r"residual_blocks needs a number of 1 or more for each of 6"):
        plan(published("liver"), PlanOverrides(residual_blocks=[1, 3, 4, 6, 6, 0]), NNUNET)
