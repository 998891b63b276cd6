"""Config values that are given in Python, as text of Hydra's override grammar."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from medconv.config.values import ConfigError

# Texts that Hydra reads as they stand. Options of a group and class names need no quotes.
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
# Words that Hydra would read as another type.
_NO_TEXT = ("null", "true", "false", "inf", "nan")
# Hydra allows no quotes around the key of a dictionary.
_ESCAPED_IN_KEYS = re.compile(r"([\\()\[\]{}:=,\s])")


def as_override(name: str, value: Any) -> str:
    """`KEY=VALUE` for a keyword argument.

    Args:
        name: a key with two underscores for each dot, such as `trainer__max_steps`; or a group.
        value: None, bool, int, float, str, path, or a list, tuple or dict of them.
    Raises:
        ConfigError: a value of another type; names the key.
    """
    key = name.replace("__", ".")
    return f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        # Not `repr`: that of a numpy number names its type.
        return str(value)
    if isinstance(value, (str, Path)):
        return _quoted(str(value))
    if isinstance(value, (list, tuple)):
        items = [_text(key, item) for item in value]
        return f"[{','.join(items)}]"
    if isinstance(value, Mapping):
        entries = [f"{_key_text(entry)}:{_text(f'{key}.{entry}', item)}" for entry, item in value.items()]
        return f"{{{','.join(entries)}}}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _text(key, value.item())  # a number of numpy or torch
    raise ConfigError(
        f"{key}: expected None, bool, a number, text, a path, or a list or dict of these, "
        f"got {type(value).__name__}"
    )


def _quoted(text: str) -> str:
    if text.startswith("~"):
        text = str(Path(text).expanduser())
    is_plain = _PLAIN.fullmatch(text) is not None
    if is_plain and text.lower() not in _NO_TEXT:
        return text
    return QuotedString(text, Quote.single).with_quotes()


def _key_text(entry: Any) -> str:
    return _ESCAPED_IN_KEYS.sub(r"\\\1", str(entry))
