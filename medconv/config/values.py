"""Plain values of a config (nested dicts and lists, dotted keys, durations), and `ConfigError`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
