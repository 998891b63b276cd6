"""The config as JSON schema, by which editors complete and check YAML files of the user's own."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from medconv.config.keys import Key, Limits, Node, declared_keys
from medconv.config.schema import RunConfig, trainer_schema
from medconv.config.values import DURATION, JSON_NAMES, members, tuples_to_lists

# Hydra fills such values in, whatever the type of the key
_INTERPOLATION = {"type": "string", "pattern": r"^\$\{.*\}$"}
_FILLED_IN_BY_THE_RUN = "derived"


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 7) of a whole config: of `config.yaml` of a run, or a file in `experiment/`."""
    from lightning import Trainer  # loads torch

    properties: dict[str, Any] = {
        "defaults": {"type": "array", "description": "options to start from, in Hydra's words"},
        "hydra": {"type": "object"},
        _FILLED_IN_BY_THE_RUN: {"type": "object"},
    }
    for key in declared_keys(RunConfig, trainer=trainer_schema(Trainer)):
        group, _, name = key.name.rpartition(".")
        if group == _FILLED_IN_BY_THE_RUN:
            continue
        # keys at the top, such as `seed`, and groups whose keys depend on a class
        if not group:
            properties[name] = _of_key(key)
            continue
        section = properties.setdefault(group, _group())
        section["properties"][name] = _of_key(key)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "medconv: the config of a run",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _group() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _of_key(key: Key) -> dict[str, Any]:
    if key.kind == Node:
        value: dict[str, Any] = {"type": "object"}
    # JSON schema has no durations; that they are more than 0 is left to `validate`
    elif key.limits.duration:
        value = {"anyOf": [{"type": "string", "pattern": f"^{DURATION}$"}, {"type": "null"}]}
    else:
        value = to_json_schema(key.kind, _bounds(key.limits), key.limits.choices)
    schema: dict[str, Any] = {}
    if value:
        schema["anyOf"] = [*value.get("anyOf", [value]), _INTERPOLATION]
    if key.text:
        schema["description"] = key.text
    if key.has_default():
        schema["default"] = tuples_to_lists(key.default)
    return schema


def _bounds(limits: Limits) -> dict[str, float]:
    """Keywords of JSON schema, which has no infinity."""
    bounds = {
        "minimum": limits.ge,
        "exclusiveMinimum": limits.gt,
        "maximum": limits.le,
        "exclusiveMaximum": limits.lt,
    }
    return {keyword: bound for keyword, bound in bounds.items() if bound is not None and bound != math.inf}


def to_json_schema(kind: Any, limits: Mapping[str, Any], choices: tuple[Any, ...]) -> dict[str, Any]:
    """A type as JSON schema.

    Args:
        limits: of each number in a value, such as `{"minimum": 1}`.
        choices: the only words or numbers; empty: all.
    """
    if kind is Any:
        return {}
    alternatives: list[dict[str, Any]] = []
    for member in members(kind):
        schema = _member_to_json_schema(member, limits, choices)
        if schema not in alternatives:  # of `int | str` with choices there is one
            alternatives.append(schema)
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _member_to_json_schema(kind: Any, limits: Mapping[str, Any], choices: tuple[Any, ...]) -> dict[str, Any]:
    origin = get_origin(kind)
    if origin is Literal:
        return {"enum": list(get_args(kind))}
    if origin is list:
        return {"type": "array", "items": to_json_schema(get_args(kind)[0], limits, choices)}
    if origin is dict:
        return {"type": "object", "additionalProperties": to_json_schema(get_args(kind)[1], limits, choices)}
    if kind is Any:
        return {}
    if choices and kind in (int, float, str):
        return {"enum": list(choices)}
    schema: dict[str, Any] = {"type": JSON_NAMES[kind]}
    return {**schema, **limits} if kind in (int, float) else schema
