"""medconv/targets/numbers.py: cells of a table become numbers, a column for each name."""

import pytest

from medconv.targets.multilabel import MultilabelTargets
from medconv.targets.regression import RegressionTargets


def test_columns_name_the_numbers() -> None:
    assert RegressionTargets.from_columns(["age", "weight"], [], None).names == ("age", "weight")
    assert RegressionTargets.from_columns(["age"], [], ["years"]).names == ("years",)
    with pytest.raises(ValueError, match=r"class_names needs a name for each of age, weight, got \['a'\]"):
        RegressionTargets.from_columns(["age", "weight"], [], ["a"])


@pytest.mark.parametrize("cell", ["", "old", "nan", "inf"])
def test_a_cell_without_a_finite_number_is_named(cell: str) -> None:
    with pytest.raises(ValueError, match=f"column 'age' must hold a finite number, got '{cell}'"):
        RegressionTargets(("age",)).parse({"age": cell})


def test_labels_are_0_or_1() -> None:
    assert MultilabelTargets(("x", "y")).parse({"x": "1", "y": "0.0"}) == (1.0, 0.0)
    with pytest.raises(ValueError, match=r"column 'x' must hold 0 or 1, got '2'; target_type=regression"):
        MultilabelTargets(("x",)).parse({"x": "2"})
