"""medconv/features/schema/json_schema.py: every key is in the schema for editors, with its type, range and text."""

import json
from typing import Any

import pytest

from medconv.cli.main import run
from medconv.features.schema.json_schema import json_schema, to_json_schema

SCHEMA = json_schema()


def test_a_key_has_its_type_range_text_and_default():
    data = SCHEMA["properties"]["data"]["properties"]
    interpolation = {"type": "string", "pattern": r"^\$\{.*\}$"}
    assert data["batch_size"] == {
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}, interpolation],
        "description": "per device; null plans it",
        "default": None,
    }
    matmul = SCHEMA["properties"]["perf"]["properties"]["matmul_precision"]
    assert matmul["anyOf"] == [{"enum": ["highest", "high", "medium"]}, interpolation]
    assert "default" not in data["cache_dir"]


def test_typed_groups_take_no_other_keys_and_classes_any():
    properties = SCHEMA["properties"]
    assert not SCHEMA["additionalProperties"] and not properties["data"]["additionalProperties"]
    assert "additionalProperties" not in properties["model"] and properties["model"]["description"]
    assert "detect_anomaly" in properties["trainer"]["properties"]  # of Lightning's Trainer


def test_the_schema_is_json():
    assert json.loads(json.dumps(SCHEMA, allow_nan=False)) == SCHEMA


@pytest.mark.parametrize(
    ("kind", "choices", "expected"),
    [
        (int, (), {"type": "integer", "minimum": 1}),
        (float | None, (), {"anyOf": [{"type": "number", "minimum": 1}, {"type": "null"}]}),
        (list[int], (), {"type": "array", "items": {"type": "integer", "minimum": 1}}),
        (dict[str, str], (), {"type": "object", "additionalProperties": {"type": "string"}}),
        (str | int, ("a", "b"), {"enum": ["a", "b"]}),
        (Any, (), {}),
    ],
)
def test_types_as_json_schema(kind, choices, expected):
    assert to_json_schema(kind, {"minimum": 1}, choices) == expected


def test_the_schema_is_printed(capsys):
    assert run(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["$schema"].startswith("http://json-schema.org/") and "data" in printed["properties"]


def test_it_takes_no_arguments():
    with pytest.raises(ValueError, match="unrecognized arguments: data=msd"):
        run(["schema", "data=msd"])
