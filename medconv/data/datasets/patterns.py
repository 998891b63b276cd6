"""Case ids and their files, from a folder or from a pattern such as `scans/{id}_*/t1.nii.gz`."""

import re
from glob import escape, glob
from pathlib import Path

from medconv.data.io.dicom_files import choice_of
from medconv.data.io.images import in_folder

_WILDCARD = re.compile(r"(\{id\}|\*)")


def files_of(pattern: str | Path, option: str) -> dict[str, Path]:
    """Case id to its file, sorted; a DICOM series is a folder that matches.

    `{id}` is the case id, as long as possible and everywhere the same, and `*` any text within one name.
    Without `{id}`, the text that `*` matches is the id. A folder of images: their stems are the ids. `#2` or
    `#b=50` at the end takes one volume of each DICOM series.
    Args: option: the option or key of the pattern, for messages.
    Raises: ValueError: no file, a pattern without a place for the id, an empty id, or two files of one case.
    """
    text = re.sub("/+", "/", str(pattern))  # as `glob` has it
    said = f"{option} {text}" if option.startswith("-") else f"{option}={text}"
    if not _WILDCARD.search(text):
        if option.startswith("-") or Path(text).is_dir():
            return in_folder(Path(text), option)
        raise ValueError(f"{said}: needs {{id}} or a `*` in the place of the case id, or a folder of images")
    if "**" in text:
        raise ValueError(f"{said}: `**` is not supported, a `*` matches a part of one name")
    choice = choice_of(Path(text))[1]
    text = text.removesuffix(choice)
    matcher = _matcher(text)
    files: dict[str, Path] = {}
    for name in sorted(glob("*".join(escape(part) for part in _WILDCARD.split(text)[::2]))):  # noqa: PTH207 - may be absolute
        if match := matcher.fullmatch(name):
            case = "_".join(dict.fromkeys(match.groups()))
            if not case:
                raise ValueError(f"{said}: nothing in {name} is left for the case id")
            if case in files:
                raise ValueError(f"{said}: {files[case]} and {name} would both be case {case}")
            files[case] = Path(name + choice)
    if not files:
        raise ValueError(f"{said}: no file matches")
    return dict(sorted(files.items()))


def is_pattern(path: str | Path) -> bool:
    return _WILDCARD.search(str(path)) is not None


def home(pattern: str | Path) -> Path:
    """The folder of all files of a pattern; a folder itself."""
    text = str(pattern)
    wildcard = _WILDCARD.search(text)
    return Path(text[: wildcard.start()] + "x").parent if wildcard else Path(text)


def _matcher(text: str) -> re.Pattern[str]:
    """Its groups are the parts of the case id."""
    parts, named = [], "{id}" in text
    for part in _WILDCARD.split(text):
        if part == "{id}":
            parts.append("(?P=id)" if "(?P<id>[^/]+)" in parts else "(?P<id>[^/]+)")
        elif part == "*":
            parts.append("[^/]*" if named else "([^/]*)")
        else:
            parts.append(re.escape(part))
    return re.compile("".join(parts))
