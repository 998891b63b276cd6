"""medconv/config/schema.py: keys of `data` say what they take; lists of words are those of the code."""

import pytest

from medconv.config import RunConfig
from medconv.config.keys import declared_keys
from medconv.data.preprocessing import normalisation, preprocess

KEYS = {key.name: key for key in declared_keys(RunConfig)}


def test_choices_are_those_that_the_code_knows():
    assert KEYS["data.normalisation"].limits.choices == normalisation.NORMALISATIONS
    assert {*KEYS["data.convention"].limits.choices, None} == set(preprocess.CONVENTIONS)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("data.normalisation", ["ct", ["ct", "zscore"], None], ["minmax", ["ct", 3]]),
        ("data.source_spacing_mm", [[1, 1], {"a_*": [1, 1, 2.5]}, None], [2, [1, 0], {"a_*": 2}]),
        ("data.case_weights", [{"a_*": 2}, None], [{"a_*": 0}, 2, {"a_*": "twice"}]),
        ("data.ignore_label", [255, "unlabelled", [255, 254], None], [2.5, {"a": 1}]),
        ("data.images", ["a/{id}.nii", {"t1": "a/{id}"}, None], [3, ["a", "b"]]),
        ("data.annotated", [{"a_*": ["liver"]}], ["liver", {"a_*": "liver"}]),
        ("data.fold", [0, "all"], [None, 0.5, "2"]),
    ],
)
def test_keys_that_take_several_types(name, good, bad):
    assert [KEYS[name].problem(value) for value in good] == [None] * len(good)
    assert all(KEYS[name].problem(value) for value in bad)
