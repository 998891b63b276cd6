"""medconv/features/image_level/table_targets.py: the kind that labels suggest; `test_csv_table.py` has whole tables."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from medconv.features.image_level.table_targets import targets_of_columns

PATH = Path("labels.csv")


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"grade": ["I", "II", "I"]}, "multiclass"),
        ({"grade": ["1", "2", ""]}, "multiclass"),
        ({"age": ["61.5", "70", ""]}, "regression"),
        ({"x": ["1", "0"], "y": ["0", "1"]}, "multilabel"),
        ({"x": ["1.5", "0"], "y": ["0", "1"]}, "regression"),
        ({"grade": ["I", "II", "2.5"]}, "multiclass"),
    ],
)
def test_labels_suggest_the_kind(columns, kind):
    labels = list(columns.values())
    assert targets_of_columns(list(columns), labels, None, None, PATH).kind == kind


@pytest.mark.parametrize(
    ("numbers", "is_asked"),
    [
        (range(60, 76), True),  # ages in years
        ((0, 1, -999), True),
        (range(5), False),
        (range(1, 7), False),
        ((0, 1, 3), False),
        ((10, 20), False),
    ],
)
def test_whole_numbers_that_may_be_no_classes_are_asked_about(numbers, is_asked):
    labels = [str(number) for number in numbers]
    expected = (
        rf"column 'age' of .* holds {len(labels)} different whole numbers from .*, which may be classes or"
    )
    with pytest.raises(ValueError, match=expected) if is_asked else nullcontext():
        assert targets_of_columns(["age"], [labels], None, None, PATH).kind == "multiclass"
    assert targets_of_columns(["age"], [labels], "ordinal", None, PATH).kind == "ordinal"


def test_several_names_for_one_column_are_classes():
    targets = targets_of_columns(["grade"], [["1", "1.5"]], None, ["1", "1.5"], PATH)
    assert targets.kind == "multiclass"


def test_an_error_names_the_table():
    with pytest.raises(ValueError, match=r"labels\.csv: column 'age' holds numbers with a decimal comma"):
        targets_of_columns(["age"], [["1,5", "2,5"]], None, None, PATH)
    numbers = [str(number) for number in range(21)]
    with pytest.raises(ValueError, match=r"column 'age' of \S*labels\.csv holds 21 different whole numbers"):
        targets_of_columns(["age"], [numbers], None, None, PATH)
