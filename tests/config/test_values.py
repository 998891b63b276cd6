"""medconv/config/values.py: nested values, dotted keys and durations."""

from typing import Any, Literal

import pytest

from medconv.config import (
    ConfigError,
    dotted_keys,
    duration_seconds,
    flatten,
    lists_to_tuples,
    tuples_to_lists,
)
from medconv.config.values import as_text, fits, in_words, is_plain


def test_lists_and_tuples_are_converted_recursively():
    assert tuples_to_lists((1, (2, [3]), "a")) == [1, [2, [3]], "a"]
    assert lists_to_tuples([1, [2, [3]], "a"]) == (1, (2, (3,)), "a")


def test_nested_keys_are_joined_by_dots():
    nested = {"data": {"root": "x", "p": {"noise": 0.1}}, "seed": 0}
    assert list(dotted_keys(nested)) == ["data", "data.root", "data.p", "data.p.noise", "seed"]
    assert flatten(nested) == {"data.root": "x", "data.p.noise": 0.1, "seed": 0}
    assert flatten({"a": {}}) == {"a": {}}


def test_a_duration_becomes_seconds():
    assert duration_seconds("01:02:03:04", "trainer.max_time") == 93784.0
    with pytest.raises(ConfigError, match=r"^trainer\.max_time must be written DD:HH:MM:SS.*got '20min'$"):
        duration_seconds("20min", "trainer.max_time")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -1], [True, 1.0, "1", None]),
        (float, [0, 1.5], [True, "1", None]),
        (bool, [True], [1, None]),
        (str | None, ["a", None], [1, ["a"]]),
        (list[int] | Literal["all"], [[], [0, 1], "all"], ["al", [0.5], 0, None]),
        (list[int | list[int]] | None, [[2, [1, 2]], None], [[[[2]]], 3, [None]]),
        (dict[str, float] | None, [{}, {"a": 2}, {3: 0.5}], [{"a": "b"}, ["a"], 1]),
        (list[dict[str, float]], [[{"mean": 1}]], [{"mean": 1}, [{"mean": "a"}]]),
        (Any, [None, 1, "a", [1]], []),
    ],
)
def test_values_fit_their_types(kind, good, bad):
    assert all(fits(value, kind) for value in good)
    assert not any(fits(value, kind) for value in bad)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (bool | None, "true, false or null"),
        (int | str, "a whole number or a word"),
        (list[float] | None, "a list of numbers or null"),
        (list[int] | Literal["all"], "a list of whole numbers or all"),
        (list[int | list[int]], "a list of whole numbers or lists"),
        (dict[str, float], "values by name, such as {name: value}"),
    ],
)
def test_types_in_words(kind, expected):
    assert in_words(kind) == expected


def test_values_are_shown_as_in_yaml():
    assert [as_text(value) for value in (None, True, [1, 0.5], "a")] == ["null", "true", "[1, 0.5]", "a"]


def test_only_types_that_yaml_tells_apart_are_plain():
    assert is_plain(float | None) and is_plain(bool)
    assert not is_plain(list[int]) and not is_plain(Any) and not is_plain("float")
