"""medconv/training/losses/fit.py: which values are weights."""

import math

import pytest

from medconv.training.losses.fit import is_weight


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (2.5, True), (-1, False), (math.inf, False), (math.nan, False), (True, False), ("1", False)],
)
def test_weights_are_finite_numbers_of_0_or_more(value, expected):
    assert is_weight(value) is expected
