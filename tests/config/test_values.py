"""medconv/config/values.py: nested values, dotted keys and durations."""

import pytest

from medconv.config import (
    ConfigError,
    dotted_keys,
    duration_seconds,
    flatten,
    lists_to_tuples,
    tuples_to_lists,
)


def test_lists_and_tuples_are_converted_recursively() -> None:
    assert tuples_to_lists((1, (2, [3]), "a")) == [1, [2, [3]], "a"]
    assert lists_to_tuples([1, [2, [3]], "a"]) == (1, (2, (3,)), "a")


def test_nested_keys_are_joined_by_dots() -> None:
    nested = {"data": {"root": "x", "p": {"noise": 0.1}}, "seed": 0}
    assert list(dotted_keys(nested)) == ["data", "data.root", "data.p", "data.p.noise", "seed"]
    assert flatten(nested) == {"data.root": "x", "data.p.noise": 0.1, "seed": 0}
    assert flatten({"a": {}}) == {"a": {}}


def test_a_duration_becomes_seconds() -> None:
    assert duration_seconds("01:02:03:04", "trainer.max_time") == 93784.0
    with pytest.raises(ConfigError, match=r"^trainer\.max_time must be written DD:HH:MM:SS.*got '20min'$"):
        duration_seconds("20min", "trainer.max_time")
