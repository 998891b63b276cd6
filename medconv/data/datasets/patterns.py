"""Case ids and their files, from a folder or from a pattern such as `scans/{id}_*/t1.nii.gz`."""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape, glob
from pathlib import Path

from medconv.data.io.class_masks import CLASS
from medconv.data.io.formats import ROI, choice_of, shown, structures_of
from medconv.data.io.images import in_folder, suffixes
from medconv.data.io.label_values import comparable_name
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some

_WILDCARD = re.compile(r"(\{id\}|\{class\}|\*)")
_ID_GROUP = "(?P<id>[^/]+)"
_NOT_IN_NAMES = ";|/"  # of classes


def files_of(pattern: str | Path, argument: str) -> dict[str, Path]:
    """Case id to its file, sorted; a DICOM series is a folder that matches.

    `{id}` is the case id, as long as possible and everywhere the same, and `*` any text within one name.
    Without `{id}`, the text that `*` matches is the id. In a folder of images, their stems are the ids.

    Args:
        pattern: a pattern or a folder; `#2` or `#b=50` at the end takes one volume of each DICOM series.
        argument: name of the argument that gives the pattern, for messages.

    Raises:
        ArgumentError: no file, a pattern without a place for the id, an empty id, or two files of one case.
    """
    if CLASS in str(pattern):
        raise ArgumentError(
            argument, f"={pattern}: {CLASS} is for labels, which may be a mask for each class"
        )
    return _files_of(pattern, argument)


def labels_of(pattern: str | Path, argument: str, class_names: Sequence[str] | None) -> dict[str, Path]:
    """As `files_of`, of labels, which may be a mask for each class (`class_masks`): `{class}` is its name.

    Args:
        class_names: background first; of these there are masks, unless the pattern names classes by `#roi=`;
            None: of all that are found.
    """
    if CLASS in str(pattern) and class_names is not None and not structures_of(pattern):
        unusable = [name for name in class_names[1:] if set(name) & set(_NOT_IN_NAMES)]
        if unusable:
            raise ArgumentError(
                argument, f"={pattern}: the class {unusable[0]!r} cannot be a part of a file's name there"
            )
        pattern = f"{pattern}{ROI}{';'.join(class_names[1:])}"
    return _files_of(pattern, argument)


def _files_of(pattern: str | Path, argument: str) -> dict[str, Path]:
    text = re.sub("/+", "/", str(pattern))  # as `glob` has it
    if not is_pattern(text):
        if Path(text).is_dir():
            return in_folder(Path(text), argument)
        if not Path(text).exists():
            raise ArgumentError(argument, f"={text}: no such folder")
        raise ArgumentError(
            argument, f"={text}: needs {{id}} or a `*` in the place of the case id, or a folder of images"
        )
    if "**" in text:
        raise ArgumentError(argument, f"={text}: `**` is not supported, a `*` matches a part of one name")
    files = matching_files(text, argument)
    if not files:
        folder = home(text)
        missing = "" if folder.is_dir() else f", as there is no folder {folder}"
        raise ArgumentError(argument, f"={shown(text)}: no file matches{missing}")
    return files


def matching_files(pattern: str | Path, argument: str) -> dict[str, Path]:
    """As `files_of`, for a pattern; empty if no file matches."""
    text = re.sub("/+", "/", str(pattern))  # as `glob` has it
    _, choice = choice_of(Path(text))
    text = text.removesuffix(choice)
    if text.count(CLASS) > 1:
        raise ArgumentError(argument, f"={pattern}: {CLASS} is there twice, expected it once")
    matcher = _matcher(text, structures_of(pattern))
    files: dict[str, Path] = {}
    found: dict[str, dict[str, str]] = defaultdict(dict)  # case to comparable name of a class to its spelling
    names = sorted(glob(_glob_pattern(text)))  # noqa: PTH207 - may be absolute
    place = matcher.groupindex.get("class", 0)
    for name in names:
        match = matcher.fullmatch(name)
        if match is None:
            continue
        texts = [part for number, part in enumerate(match.groups(), 1) if number != place]
        case_id = unicodedata.normalize("NFC", "_".join(dict.fromkeys(texts)))  # as `stem`
        if not case_id:
            raise ArgumentError(argument, f"={pattern}: nothing in {name} is left for the case id")
        if place:
            found[case_id][comparable_name(match["class"])] = match["class"]
            start, end = match.span("class")
            name = name[:start] + CLASS + name[end:]
        if case_id in files and not (place and files[case_id] == Path(name)):
            problem = f"={pattern}: {files[case_id]} and {name} would both be case {case_id}"
            raise ArgumentError(argument, problem)
        files[case_id] = Path(name)
    overlooked = sorted(_with_other_endings(names, matcher))
    if overlooked:
        problem = f"={pattern}: endings must be in small letters, rename {some(overlooked)}"
        raise ArgumentError(argument, problem)
    if not place:
        return {case_id: Path(f"{path}{choice}") for case_id, path in sorted(files.items())}
    structures = structures_of(pattern) or _all_classes(found.values(), pattern, argument)
    return {
        case_id: Path(f"{path}{ROI}{';'.join(_as_spelled(names, found[case_id]) for names in structures)}")
        for case_id, path in sorted(files.items())
    }


def _all_classes(found: Iterable[Mapping[str, str]], pattern: str | Path, argument: str) -> list[str]:
    """The classes of all cases but the background. Raises: ArgumentError: a name that a path cannot list."""
    spelled = {comparable: name for of_case in found for comparable, name in of_case.items()}
    unusable = [name for name in spelled.values() if set(name) & set(_NOT_IN_NAMES)]
    if unusable:
        raise ArgumentError(
            argument,
            f"={pattern}: the class {unusable[0]!r} has one of {' '.join(_NOT_IN_NAMES)} in its name",
        )
    return sorted(name for comparable, name in spelled.items() if comparable != "background")


def _as_spelled(names: str, found: Mapping[str, str]) -> str:
    """The names of a class, such as `Heart|Herz`, as the files of a case are spelled."""
    return "|".join(found.get(comparable_name(name), name) for name in names.split("|"))


def _with_other_endings(names: Sequence[str], matcher: re.Pattern[str]) -> Iterator[str]:
    """Files beside these that would match if their endings were in small letters."""
    endings = suffixes()
    for folder in {os.path.dirname(name) for name in names}:  # noqa: PTH120 - as `glob` writes it
        for name in os.listdir(folder or "."):  # noqa: PTH208 - names alone
            ending = next((ending for ending in endings if name.lower().endswith(ending)), "")
            if not name.startswith(".") and not name.endswith(ending):
                path = os.path.join(folder, name)  # noqa: PTH118 - as `glob` writes it
                if not matcher.fullmatch(path) and matcher.fullmatch(path[: -len(ending)] + ending):
                    yield name


def below_home(patterns: Sequence[str]) -> tuple[str, ...]:
    """Patterns from the innermost folder on that all of their files are in, such as `*_t1.nii.gz`."""
    root = os.path.commonpath([home(pattern) for pattern in patterns])
    return tuple(os.path.relpath(pattern, root) for pattern in patterns)


def is_pattern(path: str | Path) -> bool:
    """Whether a path has `{id}` or `*`."""
    text = str(path)
    return _WILDCARD.search(text, len(_existing(text))) is not None


def home(pattern: str | Path) -> Path:
    """The folder of all files of a pattern; a folder itself."""
    text = str(pattern)
    wildcard = _WILDCARD.search(text, len(_existing(text)))
    if wildcard is None:
        return Path(text)
    # A letter in place of the wildcard, since Path drops a slash at the end
    return Path(text[: wildcard.start()] + "x").parent


def _existing(text: str) -> str:
    """The folders at the beginning that are there by just this name, such as `T2*` of MRI: no patterns."""
    end = 0
    for slash in re.finditer("/|$", text):
        if _WILDCARD.search(text, end, slash.start()) and not Path(text[: slash.start()]).is_dir():
            break
        end = slash.start()
    return text[:end]


def _glob_pattern(text: str) -> str:
    """The pattern with `*` for `{id}`; other special characters of `glob` are escaped."""
    existing = _existing(text)
    texts_between = _WILDCARD.split(text.removeprefix(existing))[::2]
    return escape(existing) + "*".join(escape(between) for between in texts_between)


def _matcher(text: str, structures: Sequence[str]) -> re.Pattern[str]:
    """A regular expression for the pattern; its groups, joined, are the case id, but for one named `class`.

    Args:
        structures: those that `{class}` may be, see `structures_of`; empty: any text.
    """
    existing = _existing(text)
    text = text.removeprefix(existing)
    has_id = "{id}" in text
    expression = re.escape(existing)
    for piece in _WILDCARD.split(text):
        if piece == "{id}":
            # The first one is a group, and the others must match the same text
            expression += "(?P=id)" if _ID_GROUP in expression else _ID_GROUP
        elif piece == CLASS:
            accepted = [_any_spelling(name) for names in structures for name in names.split("|") if name]
            expression += f"(?P<class>{'|'.join(accepted) or '[^/]+'})"
        elif piece == "*":
            expression += "[^/]*" if has_id else "([^/]*)"
        else:
            expression += re.escape(piece)
    return re.compile(expression)


def _any_spelling(name: str) -> str:
    """A regular expression for a name in any letters, and with `_` for blanks, see `comparable_name`."""
    return f"(?i:{'[ _]+'.join(map(re.escape, comparable_name(name).split()))})"
