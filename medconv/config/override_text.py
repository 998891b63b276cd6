"""Overrides as they stand on a command line, such as paths with `{id}`, in the grammar that Hydra reads."""

import re
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

_PATTERN_KEY = r"data\.(images|labels)(\.\w+)?"
_TEXT_WITH_HASH = r"(?:\{id\}|[^,:{}])*#[^,{}]*"  # such as scans/{id}#b=50 or rs.dcm#roi=heart;lung
_QUOTED_OR_ID = re.compile(r"'[^']*'|(?<!\\)\{id\}")
_LIST_CHOICES_OR_CALL = r"^(\[|{)|[,$]|^\w+\("


def escaped(argument: str) -> str:
    """An argument with its value in quotes where Hydra would not read it as it stands.

    Hydra gives braces and parentheses a meaning, and knows no letters but ASCII's.
    """
    key, equals, value = argument.partition("=")
    if not equals or argument.startswith("-") or "'" in value or '"' in value:
        return argument
    if key == "data.group_pattern" and value != "null":
        return f"{key}='{value}'"
    if re.fullmatch(_PATTERN_KEY, key.lstrip("+")):
        argument = f"{key}={_escaped_pattern(value)}"
    has_meaning = re.search(_LIST_CHOICES_OR_CALL, value.replace("{id}", "")) is not None
    if has_meaning or _is_readable(argument):
        return argument
    if value.startswith("~"):  # shells leave it in KEY=~/data
        value = str(Path(value).expanduser())
    return f"{key}='{value}'"


def _escaped_pattern(value: str) -> str:
    """A pattern of file names: Hydra takes # in quotes alone, and `{id}` with a backslash."""
    quoted = re.sub(_TEXT_WITH_HASH, r"'\g<0>'", value)
    return _QUOTED_OR_ID.sub(lambda match: match[0] if match[0].startswith("'") else r"\{id\}", quoted)


def _is_readable(argument: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([argument])
    except OverrideParseException:
        return False
    return True
