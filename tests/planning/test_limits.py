"""medconv/planning/limits.py: smaller sizes cost less in every way, and need fewer steps."""

from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.plans import published, single_case

from medconv.planning.limits import SIZES, PlanOverrides, need_size
from medconv.planning.planner import plan
from medconv.planning.topology import Budget


def test_sizes_fall_in_every_limit():
    full, *coarsening = SIZES.values()
    assert full == replace(coarsening[0], name="full", enough_steps=full.enough_steps, coarsens=False)
    assert full.enough_steps > coarsening[0].enough_steps
    for larger, smaller in pairwise(coarsening):
        assert larger.memory_share > smaller.memory_share and larger.enough_steps > smaller.enough_steps
        assert larger.base_channels > smaller.base_channels
        for dims in (2, 3):
            assert larger.max_channels[dims] > smaller.max_channels[dims]
            assert larger.max_batch[dims] >= smaller.max_batch[dims]


@pytest.mark.parametrize("name", ["hippocampus", "prostate", pytest.param("liver", marks=pytest.mark.slow)])
def test_a_smaller_size_plans_a_narrower_network_and_no_larger_patch(name):
    plans = [plan(published(name), budget=Budget(1, size=size)) for size in SIZES if size != "full"]
    for larger, smaller in pairwise(plans):
        assert smaller.channels[0] < larger.channels[0] and smaller.batch_size <= larger.batch_size
        assert all(a <= b for a, b in zip(smaller.patch_size, larger.patch_size, strict=True))
    assert plans[-1].size == "tiny" and plans[-1].rows[0][:2] == ("size", "tiny")


def test_a_size_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"size must be full, large, medium, small, tiny or None, got huge"):
        need_size("huge")


@pytest.mark.parametrize(
    ("values", "message"), [({"divisible_by": 0}, r"divisible_by must be a whole number from 1, got 0")]
)
def test_numbers_below_one_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PlanOverrides(**values)


def test_resize_is_not_for_label_maps():
    with pytest.raises(ValueError, match=r"resize needs cases with values"):
        plan(single_case((30, 30), (1, 1)), PlanOverrides(resize=(17, 17)))
