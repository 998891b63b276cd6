"""medconv/data/per_case.py: settings by patterns of case ids."""

from pathlib import Path
from typing import Any

import pytest

from medconv.config import ConfigError
from medconv.data.case import Case, Dataset
from medconv.data.per_case import with_source_spacing

CASES = tuple(Case(name, (Path(f"{name}.nii.gz"),)) for name in ("a_1", "a_2", "b_1"))
DATASET = Dataset("d", CASES, ("background", "x", "y"), ("MRI",))


def spacings(setting: Any) -> list[tuple[float, ...] | None]:
    return [case.source_spacing_mm for case in with_source_spacing(DATASET, setting).cases]


def test_source_spacing_is_of_all_cases_or_of_those_that_a_pattern_matches() -> None:
    assert with_source_spacing(DATASET, None) is DATASET
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
def test_wrong_settings_name_key_and_case(setting: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.source_spacing_mm.*{words}"):
        with_source_spacing(DATASET, setting)
