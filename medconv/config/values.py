"""Plain values of a config: by dotted keys, as YAML, durations; their types in words and JSON schema."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf._utils import get_omega_conf_dumper

DURATION = r"\d+:\d{1,2}:\d{1,2}:\d{1,2}"  # days, hours, minutes, seconds


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key."""

    @classmethod
    def of_all(cls, problems: Sequence[str]) -> "ConfigError":
        """One error for several wrong keys. Args: problems: a message for each, which names its key."""
        if len(problems) == 1:
            return cls(problems[0])
        lines = "\n".join(f"  {problem}" for problem in problems)
        return cls(f"{len(problems)} keys of the config are wrong:\n{lines}")


def dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested config."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield f"{prefix}{name}"
            yield from dotted_keys(child, f"{prefix}{name}.")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, for every leaf of a nested config."""
    if not isinstance(node, dict) or not node:
        return {prefix.removesuffix("."): node}
    leaves: dict[str, Any] = {}
    for name, child in node.items():
        leaves |= flatten(child, f"{prefix}{name}.")
    return leaves


def tuples_to_lists(value: Any) -> Any:
    """Convert tuples to lists, recursively: YAML and `weights_only` loading hold lists."""
    return [tuples_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, recursively."""
    return tuple(lists_to_tuples(item) for item in value) if isinstance(value, list) else value


def duration_seconds(duration: str, key: str) -> float:
    """Seconds of a duration written `DD:HH:MM:SS`, as in Lightning. Raises: ConfigError: another form."""
    if not re.fullmatch(DURATION, duration):
        raise ConfigError(
            f"{key} must be written DD:HH:MM:SS, such as 00:00:20:00 for 20 minutes, in quotes in YAML, got "
            f"{duration!r}"
        )
    days, hours, minutes, seconds = (int(number) for number in duration.split(":"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration_text(seconds: float) -> str:
    """Whole seconds as `DD:HH:MM:SS`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24:02}:{hours % 24:02}:{minute:02}:{second:02}"


def texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every string in a nested node, including the names of keys, with its full key."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            if isinstance(name, str):
                yield key, name
            yield from texts(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from texts(child, f"{key}[{index}]")
    elif isinstance(node, str):
        yield key, node


# What a command line and YAML read as a number, a truth value or null
NO_TEXT = re.compile(
    r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[+-]?\d+)?|[+-]?inf|nan|true|false|null", re.IGNORECASE
)

_WORDS = {int: "a whole number", float: "a number", str: "a word", NoneType: "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "words", list: "lists"}
JSON_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type such as `list[int] | None`. Whole numbers are numbers; true is none."""
    if kind is Any:
        return True
    origin = get_origin(kind)
    arguments = get_args(kind)
    # `int | None` and `Optional[int]`, as Lightning writes it, are of two types
    if origin in (Union, UnionType):
        return any(fits(value, member) for member in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        # of keys YAML makes words or numbers, such as of a case id 001
        return isinstance(value, Mapping) and all(fits(item, arguments[1]) for item in value.values())
    # by `type`, since true and false are whole numbers for `isinstance`
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def is_plain(kind: Any) -> bool:
    """Whether a type is built of true or false, numbers, words and null alone, which YAML tells apart."""
    return all(member in JSON_NAMES for member in members(kind))


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def is_text(kind: Any) -> bool:
    """Whether a type takes words alone, or lists of them."""
    return kind is not NoneType and all(member in (str, list[str], NoneType) for member in members(kind))


def in_words(kind: Any) -> str:
    """A type for messages, such as `a list of numbers or null`."""
    words = []
    for member in members(kind):
        words += ["true", "false"] if member is bool else [_member_in_words(member)]
    return enumeration(words)


def enumeration(words: Sequence[Any]) -> str:
    """Words as `a, b or c`."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last


def _member_in_words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return enumeration(get_args(kind))
    if origin is list:
        items = [get_origin(item) or item for item in members(get_args(kind)[0])]
        return f"a list of {enumeration([_PLURALS.get(item, 'values') for item in items])}"
    if origin is dict:
        return "values by name, such as {name: value}"
    return _WORDS.get(kind, "any value")


def as_text(value: Any) -> str:
    """A value for messages, as YAML writes it: a text that looks like a number is in quotes."""
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    if is_word:
        return words[value]
    return f"'{value}'" if isinstance(value, str) and NO_TEXT.fullmatch(value) else str(value)


def to_yaml(values: Any) -> str:
    """YAML of plain values, in their order; texts that YAML or Hydra would read as numbers are quoted."""
    text: str = yaml.dump(
        values, Dumper=get_omega_conf_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text


def from_yaml(text: str) -> Any:
    """Plain values of YAML text. Raises: yaml.YAMLError: it is not YAML."""
    return yaml.safe_load(text)
