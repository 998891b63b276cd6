"""medconv/planning/limits.py: values of the config that no plan can have are refused."""

import pytest
from helpers.plans import single_case

from medconv.planning.limits import PlanOverrides
from medconv.planning.planner import plan


@pytest.mark.parametrize(
    ("values", "message"), [({"divisible_by": 0}, r"divisible_by must be a whole number from 1, got 0")]
)
def test_numbers_below_one_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        PlanOverrides(**values)


def test_resize_is_not_for_label_maps():
    with pytest.raises(ValueError, match=r"resize needs cases with values"):
        plan(single_case((30, 30), (1, 1)), PlanOverrides(resize=(17, 17)))
