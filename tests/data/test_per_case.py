"""medconv/data/per_case.py: settings by patterns of case ids."""

from dataclasses import replace
from pathlib import Path

import pytest

from medconv.data.case import Case, Dataset
from medconv.data.per_case import (
    check_annotated,
    kind_weights,
    with_annotated,
    with_source_spacing,
    with_weights,
)
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
    numbered = with_annotated(replace(DATASET, class_names=("background", "1", "2")), {"a_*": [2]})
    assert [case.annotated for case in numbered.cases] == [(2,), (2,), None]
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


def pictures(*kinds):
    """Percentiles of three channels by case; kinds are (count, darkest values of red, green, blue)."""
    percentiles = {}
    for number, (count, *channels) in enumerate(kinds):
        for i in range(count):
            rows = [[low, low + 5, low + 10 + i % 3, low + 20, low + 40] for low in channels]
            percentiles[f"{number}_{i:02}"] = rows
    return percentiles


def weights(*kinds):
    """The weight of each kind, by the first part of the ids."""
    return {name[0]: weight for name, weight in kind_weights(pictures(*kinds)).items()}


def test_rare_kinds_of_pictures_are_drawn_more_often():
    fluorescent, smears, stained = (16, 0, 0, 0), (4, 200, 200, 200), (9, 150, 60, 150)
    assert weights(fluorescent, smears, stained) == {"0": 1, "1": 2, "2": 1.33}
    # Two may be faulty
    assert weights(fluorescent, (2, 200, 200, 200), stained) == {"0": 1, "1": 1, "2": 1.33}


@pytest.mark.parametrize(
    "kinds",
    [
        [(16, 0, 0, 0)],
        [(16, 0, 0, 0), (2, 200, 200, 200)],
        [(9, 0, 0, 0), (5, 8, 8, 8), (5, 16, 16, 16)],  # no gap between them
        [(9, 100, 60, 100), (5, 100, 70, 100), (5, 100, 80, 100)],
        [],
    ],
)
def test_pictures_of_one_kind_are_drawn_alike(kinds):
    assert weights(*kinds) == {}


def test_constant_pictures_are_of_no_kind():
    assert kind_weights({name: [[7.0] * 5] for name in "abc"}) == {}
