"""medconv/features/image_level/table_targets.py: the kind that labels suggest; `test_csv_table.py` has whole tables."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from medconv.features.image_level.table_targets import targets_of_columns
from medconv.utils.errors import ArgumentError

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


def test_the_order_of_grades_in_words_is_asked_for():
    labels = [["low", "high", "medium"]]
    with pytest.raises(
        ArgumentError, match="class_names is needed: .* in words, high, low, medium, whose order"
    ):
        targets_of_columns(["risk"], labels, "ordinal", None, PATH)
    names = ["low", "medium", "high"]
    assert targets_of_columns(["risk"], labels, "ordinal", names, PATH).names == tuple(names)
    of_cells = targets_of_columns(["T"], [["T2", "T10", "T1"]], "ordinal", None, PATH)
    assert of_cells.names == ("T1", "T2", "T10")
    with pytest.raises(ArgumentError, match="class_names is needed"):
        targets_of_columns(["TN"], [["T2", "N1"]], "ordinal", None, PATH)


@pytest.mark.parametrize("cell", ["a|b", "b; a"])
def test_several_findings_in_a_cell_are_no_class(cell):
    with pytest.raises(ValueError, match=rf"labels.csv: column 'label' holds several .* '{re.escape(cell)}'"):
        targets_of_columns(["label"], [["a", "b", cell]], None, None, PATH)
    labels = [["T1|T2", "T3|T4"]]  # neither part is a label
    assert targets_of_columns(["label"], labels, None, None, PATH).names == ("T1|T2", "T3|T4")


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


def test_decimal_commas_are_named_beside_whole_numbers_and_empty_cells():
    with pytest.raises(
        ValueError, match=r"table\.csv: column 'age' holds numbers with a decimal comma, such as 0,5"
    ):
        targets_of_columns(["age"], [["0,5", "1,5", "2", ""]], None, None, Path("table.csv"))
