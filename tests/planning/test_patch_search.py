"""The search for a patch: every plan fits the memory; the batch has bounds; bad sizes are refused."""

from math import prod

import pytest
from helpers.plans import NNUNET, fingerprint, published, reason, single_case

from medconv.planning.limits import PlanOverrides
from medconv.planning.planner import plan
from medconv.planning.topology import Budget, Network, step_bytes


def test_more_memory_never_gives_less_and_every_plan_fits():
    previous = (0, 0)
    for gb in (1, 4, 16, 48):
        planned = plan(single_case((512, 512, 300), (0.8, 0.8, 1)), budget=Budget(gb))
        network = Network(planned.strides, planned.kernel_sizes, planned.channels)
        assert step_bytes(network, planned.patch_size, planned.batch_size, 1, 2, Budget(gb)) <= gb * 2**30
        size = (prod(planned.patch_size), planned.batch_size)
        assert size >= previous and max(planned.patch_size) <= 2 * min(planned.patch_size)
        previous = size


def test_a_batch_is_never_larger_than_the_maximum():
    """Six cases of 32^3 are less than 20 patches: 5 % of their voxels are no patch at all."""
    few = fingerprint([(32,) * 3] * 6, [(1.0,) * 3] * 6)
    assert (plan(few).batch_size, reason(plan(few), "batch")) == (
        2,
        "the minimum, above a limit (5 % of all voxels: 0)",
    )
    assert plan(few, PlanOverrides(max_batch_size=1)).batch_size == 1


def test_with_a_maximum_batch_of_one_the_patch_is_not_shrunk_for_two():
    single, pair = (plan(published("liver"), PlanOverrides(max_batch_size=n), NNUNET) for n in (1, 2))
    assert single.batch_size == 1 and prod(single.patch_size) > prod(pair.patch_size)


def test_a_patch_beyond_the_budget_gives_a_warning(caplog):
    plan(published("liver"), PlanOverrides(patch_size=[128, 128, 128]), NNUNET)
    assert not caplog.records
    plan(published("liver"), PlanOverrides(patch_size=[512, 512, 384]), NNUNET)
    (record,) = caplog.records
    assert "patch_size=[512,512,384] in a batch of 1 takes about" in record.getMessage()
    assert "GB, the budget is 10 GB (" in record.getMessage()
    plan(published("liver"), PlanOverrides(patch_size=[512, 512, 384]), NNUNET, warns=False)
    assert len(caplog.records) == 1


def test_the_batch_is_one_if_two_samples_do_not_fit():
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


def test_a_small_budget_does_not_remove_stages_of_the_config():
    planned = plan(published("liver"), PlanOverrides(channels=(8, 16, 24, 32)), Budget(0.2))
    assert len(planned.channels) == 4 and min(planned.patch_size) < 64
    with pytest.raises(ValueError, match=r"the smallest patch, 32 x 32 x 16 voxels, in a batch of 1"):
        plan(published("liver"), PlanOverrides(channels=(8, 16, 24, 32)), Budget(0.001))


@pytest.mark.parametrize(
    ("key", "axes"), [("spacing_mm", 3), ("patch_size", 3), ("spacing_mm", 2), ("patch_size", 2)]
)
@pytest.mark.parametrize("fault", ["too few", "too many", "zero", "negative"])
def test_a_spacing_or_patch_without_one_positive_number_per_axis_is_refused(key, axes, fault):
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


def test_a_budget_too_small_is_refused_with_the_memory_needed():
    words = (
        r"memory_gb: the smallest patch, 16 x 16 x 16 voxels, in a batch of 1 takes about "
        r"0\.\d+ GB, the budget is 0.001"
    )
    with pytest.raises(ValueError, match=words):
        plan(published("liver"), budget=Budget(0.001))
    with pytest.raises(ValueError, match=r"in a batch of 500 takes about"):
        plan(published("liver"), PlanOverrides(batch_size=500), Budget(0.1))


def test_residual_blocks_take_memory_and_bound_the_stages():
    blocks = [1, 3, 4, 6, 6, 6]
    residual = plan(published("liver"), PlanOverrides(residual_blocks=blocks, convs_per_stage=1), NNUNET)
    assert prod(residual.patch_size) < prod(plan(published("liver"), budget=NNUNET).patch_size)
    assert len(plan(published("liver"), PlanOverrides(residual_blocks=[1, 3]), NNUNET).channels) == 2
    with pytest.raises(ValueError, match=r"residual_blocks needs a number of 1 or more for each of 6"):
        plan(published("liver"), PlanOverrides(residual_blocks=[1, 3, 4, 6, 6, 0]), NNUNET)
