"""medconv/data/datasets/tables.py: words for no value, and one class in several spellings."""

import pytest

from medconv.data.datasets.tables import is_missing, missing_error, spelling_error


@pytest.mark.parametrize(
    "cell", ["", "nan", "NaN", "NA", "n/a", "#N/A", "<NA>", "None", "NONE", "null", "nil"]
)
def test_words_for_no_value(cell):
    assert is_missing(cell)
    assert not is_missing(cell, [cell, "other"])
    assert is_missing(cell, ["other"])


@pytest.mark.parametrize("cell", ["0", "no", "normal", "nan1", "Nancy", "-"])
def test_other_words_are_values(cell):
    assert not is_missing(cell)


def test_the_error_names_column_and_cell():
    assert missing_error("grade", "", "a label") == "column 'grade' is empty, expected a label"
    assert "column 'grade' holds NA, which stands" in missing_error("grade", "NA", "a label")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Benign", "benign"),
        ("left lung", "left_lung"),
        ("1", "1.0"),
        ("\uff21", "a"),
        ("caf\u00e9", "cafe\u0301"),
    ],
)
def test_spellings_of_one_class(first, second):
    error = spelling_error([first, "other", second, first])
    assert error == f"classes that differ in their spelling alone: {first} and {second}"


def test_different_classes_may_stand_side_by_side():
    assert spelling_error(["1", "2", "10", "II", "III", "benign", "benign 2"]) is None
