"""medconv/planning/limits.py: values of the config that no plan can have are refused."""

from typing import Any

import pytest

from medconv.planning.limits import PlanOverrides


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_stages": 0}, r"max_stages must be 1 or more, or None, got 0"),
        ({"max_batch_size": 0}, r"max_batch_size must be 1 or more, or None, got 0"),
        ({"divisible_by": 0}, r"divisible_by must be a whole number from 1, got 0"),
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
    ],
)
def test_numbers_below_one_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanOverrides(**values)


def test_resize_needs_image_level_data_and_positive_numbers() -> None:
    with pytest.raises(ValueError, match=r"resize needs cases with values"):
        PlanOverrides(resize=(17, 17))
    with pytest.raises(ValueError, match=r"resize needs positive numbers of voxels, got \[17, 0\]"):
        PlanOverrides(resize=(17, 0), image_level=True)
