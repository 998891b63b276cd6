"""medconv/data/per_case.py: settings by patterns of case ids."""

from pathlib import Path

import pytest

from medconv.data.case import Case, Dataset
from medconv.data.per_case import check_annotated, with_annotated, with_source_spacing, with_weights
from medconv.utils.errors import ArgumentError

CASES = tuple(Case(name, (Path(f"{name}.nii.gz"),)) for name in ("a_1", "a_2", "b_1"))
DATASET = Dataset("d", CASES, ("background", "x", "y"), ("MRI",))


def spacings(setting):
    return [case.source_spacing_mm for case in with_source_spacing(DATASET, setting).cases]


def test_source_spacing_is_of_all_cases_or_of_those_that_a_pattern_matches():
    assert spacings([1, 2, 10]) == [(1.0, 2.0, 10.0)] * 3
    assert spacings({"a_*": [1, 2, 10], "b_1": [1, 1, 5]}) == [(1, 2, 10), (1, 2, 10), (1, 1, 5)]
    assert spacings({"a_2": [1, 2, 10]}) == [None, (1, 2, 10), None]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ([1, 0, 2], r"expected positive numbers of mm"),
        ([1], r"expected positive numbers of mm"),
        ("1,1,10", r"expected positive numbers of mm"),
        ({"a_*": 3}, r"expected positive numbers of mm"),
        ({"c_*": [1, 1, 1]}, r"no case matches c_\*; the ids are a_1, a_2, b_1"),
        ({"a_*": [1, 1, 1], "*_1": [1, 1, 2]}, r"case a_1 matches both a_\* and \*_1"),
    ],
)
def test_wrong_settings_name_key_and_case(setting, words):
    with pytest.raises(ArgumentError, match=rf"^source_spacing_mm.*{words}"):
        with_source_spacing(DATASET, setting)


def test_annotated_classes_become_label_values():
    dataset = with_annotated(DATASET, {"a_*": ["y"], "b_1": ["y", "x"]})
    assert [case.annotated for case in dataset.cases] == [(2,), (2,), (1, 2)]
    check_annotated(dataset.cases, dataset, ())
    with pytest.raises(ArgumentError, match=r"annotated: no training case annotates x"):
        check_annotated(dataset.cases[:2], dataset, ())
    with pytest.raises(
        ArgumentError, match=r"case a_1 annotates only one of x and y, which flip_label_pairs"
    ):
        check_annotated(dataset.cases, dataset, [(1, 2)])


@pytest.mark.parametrize(
    "setting", [["x"], {"a_*": "x"}, {"a_*": []}, {"a_*": ["z"]}, {"a_*": ["background"]}]
)
def test_wrong_annotated_classes_are_refused(setting):
    with pytest.raises(ArgumentError, match=r"^annotated=.*: expected {PATTERN: .* of x, y"):
        with_annotated(DATASET, setting)


def test_weights_of_cases_are_positive_numbers():
    assert [case.weight for case in with_weights(DATASET, {"b_*": 2.5}).cases] == [1, 1, 2.5]
    for setting in ({"b_*": 0}, {"b_*": "much"}, 2):
        with pytest.raises(ArgumentError, match=r"^case_weights=.*: expected {PATTERN: a positive number}"):
            with_weights(DATASET, setting)
