"""medconv/config/keys.py: what a key takes is declared once, and one message says what is wrong."""

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import pytest

from medconv.config.keys import declared_keys, key


@dataclass(frozen=True)
class Inner:
    share: float = key(0.5, "a share", ge=0, lt=1)
    names: Any = key(None, "names", accepts=str | list[str] | None, choices=("a", "b"))
    sizes: list[int] = key([1], "sizes", ge=1)
    span: str | None = key(None, "a duration", duration=True, gt=0)
    count: int | None = key(None, "a count", ge=1, le=9)
    length: float = key(1.0, "a length", gt=0, lt=inf)
    folder: str | None = key(None, "a folder", path=True)
    plain: bool = False


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    seed: int = key(0, "a seed", ge=0)


KEYS = {key.name: key for key in declared_keys(Outer)}


def test_keys_of_groups_have_their_full_name_type_default_and_text():
    assert list(KEYS) == [
        *("inner.share", "inner.names", "inner.sizes", "inner.span", "inner.count", "inner.length"),
        *("inner.folder", "inner.plain", "seed"),
    ]
    assert KEYS["inner.sizes"].default == [1] and KEYS["inner.sizes"].kind == list[int]
    assert KEYS["inner.share"].text == "a share" and KEYS["inner.plain"].text == ""
    assert Inner().sizes is not Inner().sizes


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("seed", -1, "seed must be at least 0, got -1"),
        ("seed", "a", "seed must be a whole number, got a"),
        ("inner.share", 1.0, "inner.share must be at least 0 and below 1, got 1.0"),
        ("inner.share", nan, "inner.share must be at least 0 and below 1, got nan"),
        ("inner.names", "c", "inner.names must be a, b or null, or a list of these, got c"),
        ("inner.names", ["a", "c"], "inner.names must be a, b or null, or a list of these, got ['a', 'c']"),
        ("inner.names", 3, "inner.names must be a, b or null, or a list of these, got 3"),
        ("inner.sizes", [2, 0], "inner.sizes must be numbers, each at least 1, got [2, 0]"),
        ("inner.sizes", None, "inner.sizes must be a list of whole numbers, got null"),
        ("inner.count", 10, "inner.count must be at least 1 and at most 9, got 10"),
        ("inner.length", inf, "inner.length must be more than 0 and finite, got inf"),
        ("inner.span", "00:00:00:00", "inner.span must be more than 0, got 00:00:00:00"),
        ("inner.plain", "yes", "inner.plain must be true or false, got yes"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(name, value, expected):
    assert KEYS[name].problem(value) == expected


@pytest.mark.parametrize("address", ["s3://bucket/scans", "gs://bucket", "http://host/a.zip"])
def test_an_address_is_no_path(address):
    scheme = address.partition("//")[0]
    assert KEYS["inner.folder"].problem(address) == (
        f"inner.folder={address}: needs a path on this machine, not an address; mount {scheme}// as a folder "
        "or copy it (docs/scale.md, Data elsewhere)"
    )


@pytest.mark.parametrize("path", ["/data/a b", "data/s3:/x", "C:\\data", "${oc.env:HOME}/x", None])
def test_other_words_are_paths(path):
    assert KEYS["inner.folder"].problem(path) is None


def test_a_duration_must_be_written_as_one():
    problem = KEYS["inner.span"].problem("soon") or ""
    assert problem.startswith("inner.span must be written DD:HH:MM:SS") and problem.endswith("got 'soon'")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 0),
        ("inner.share", 0),
        ("inner.names", ["a", "b"]),
        ("inner.names", None),
        ("inner.sizes", []),
        ("inner.count", None),
        ("inner.span", "00:00:00:01"),
        ("inner.length", "???"),  # filled in by the run
    ],
)
def test_good_values_have_no_problem(name, value):
    assert KEYS[name].problem(value) is None
