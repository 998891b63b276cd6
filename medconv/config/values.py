"""Plain values of a config (nested dicts and lists, dotted keys, durations), and `ConfigError`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key."""


def dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested config."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield f"{prefix}{name}"
            yield from dotted_keys(child, f"{prefix}{name}.")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, for every leaf of a nested config."""
    if isinstance(node, dict) and node:
        return {k: v for name, child in node.items() for k, v in flatten(child, f"{prefix}{name}.").items()}
    return {prefix[:-1]: node}


def tuples_to_lists(value: Any) -> Any:
    """Convert tuples to lists, recursively: YAML and `weights_only` loading hold lists."""
    return [tuples_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def lists_to_tuples(value: Any) -> Any:
    """Convert lists to tuples, recursively."""
    return tuple(lists_to_tuples(item) for item in value) if isinstance(value, list) else value


def duration_seconds(duration: str, key: str, positive: bool = False) -> float:
    """Seconds of a duration written `DD:HH:MM:SS`, as in Lightning. Raises: ConfigError: another form, or 0
    where it must be positive.
    """
    if not re.fullmatch(r"\d+:\d{1,2}:\d{1,2}:\d{1,2}", duration):
        raise ConfigError(
            f"{key} must be written DD:HH:MM:SS, such as 00:00:20:00 for 20 minutes, in quotes in YAML, got "
            f"{duration!r}"
        )
    days, hours, minutes, rest = (int(part) for part in duration.split(":"))
    seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if positive and not seconds:
        raise ConfigError(f"{key} must be more than 0, got {duration}")
    return seconds
