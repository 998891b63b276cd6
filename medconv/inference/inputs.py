"""The cases to predict: a file, a folder of images or of DICOM, a pattern, or a list of files."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medconv.data.case import Case
from medconv.data.datasets import patterns
from medconv.data.datasets.common import id_error
from medconv.data.datasets.dataset_json import channel_of, group_channels, missing_numbers, num_files
from medconv.data.datasets.tables import PATH_COLUMN, path_column_of, read_rows, row_ids
from medconv.data.io.formats import choice_of
from medconv.data.io.images import (
    DICOM_IS_MISSING,
    formats,
    in_folder,
    known_by_content,
    stem,
    suffix_list,
    suffixes,
    volume_suffixes,
)
from medconv.data.io.images import num_channels as image_channels
from medconv.utils.errors import explained
from medconv.utils.logging import some


@dataclass(frozen=True)
class InputPath:
    """Where the cases come from; in messages `name path`."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


@dataclass(frozen=True)
class ListedCase:
    """A case of a list. Args: case_id: None: by the name of its first file. paths: None: missing channels."""

    case_id: str | None
    paths: tuple[str | None, ...]


def read_text_list(source: InputPath) -> list[ListedCase]:
    entries: list[ListedCase] = []
    for line in _text(source).splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            paths = tuple(line.split("\t"))
            if not all(paths):
                raise ValueError(f"{source}: expected files separated by one tab each, got {line!r:.80}")
            entries.append(ListedCase(None, paths))
    return entries


def read_table(source: InputPath, answers: Sequence[str], path_column: str) -> list[ListedCase]:
    """A row for each image, as `data=csv` reads them. Args: as of `find_cases`."""
    header, numbered_rows = read_rows(source.path)
    column = path_column_of(header, path_column)
    if column is None:
        accepted = " or ".join(map(repr, dict.fromkeys([path_column, PATH_COLUMN])))
        raise ValueError(f"{source}: no column {accepted}, it has {', '.join(header)}")
    for number, row in numbered_rows:
        if not row[column]:
            raise ValueError(f"{source}, row {number}: column {column!r} is empty, expected an image file")
    rows = [row for _, row in numbered_rows]
    case_ids = row_ids(source.path, header, rows, column, answers)
    return [ListedCase(case_id, (row[column],)) for case_id, row in zip(case_ids, rows, strict=True)]


def read_json(source: InputPath) -> list[ListedCase]:
    text = _text(source)
    with explained(f"{source}: not JSON", ValueError, RecursionError):
        # Tuples of pairs, since a dict would lose a key that occurs twice.
        content = json.loads(text, object_pairs_hook=tuple)
    if isinstance(content, list):
        return [ListedCase(None, _paths(item, source)) for item in content]
    if isinstance(content, tuple):
        return [ListedCase(case_id, _paths(item, source)) for case_id, item in content]
    raise ValueError(f"{source}: expected an array of cases, or an object of case id to files")


def _paths(item: Any, source: InputPath) -> tuple[str | None, ...]:
    paths = [item] if isinstance(item, str) else item
    is_list = isinstance(paths, list) and any(paths)
    if not is_list or not all(path is None or (isinstance(path, str) and path) for path in paths):
        raise ValueError(
            f"{source}: a case is a path, or an array of paths, one per channel; got {item!r:.80}"
        )
    return tuple(paths)


def _text(source: InputPath) -> str:
    with explained(f"{source}: cannot be read as text", OSError, UnicodeDecodeError):
        return source.path.read_text(encoding="utf-8-sig")


# The ending of the first channel's name.
_FIRST_CHANNEL = "_0000"
log = logging.getLogger(__name__)


def find_cases(
    source: Path,
    num_channels: int,
    answers: Sequence[str] = (),
    name: str = "source",
    takes_missing: bool = False,
    image_patterns: Sequence[str] = (),
    path_column: str = PATH_COLUMN,
) -> list[Case]:
    """The cases in a file, a folder, a pattern with `{id}` or a list; channels are files CASE_0000,
    CASE_0001, ... or in one file.

    In a folder where files match the patterns of the training images, these are the cases, by the ids that
    the patterns have. In another one where some name ends in `_0000`, all files must be such channels.
    Without volumes of another format each DICOM series is a case, in subfolders too; without either, pictures
    are read.

    Lists: `.csv` has a row for each image, with its file in the column of training or in `path`; `.txt` has
    a case in each line, its channels separated by tabs; `.json` is an array of cases (a path, or an array of
    paths), or an object of case id to such cases; null stands for a missing channel. Paths are relative to
    the list's folder.
    `#2` or `#b=50` at the end of `source` takes one volume of each DICOM series.

    Args:
        source: a file, folder, pattern or list.
        num_channels: of the networks.
        answers: columns of labels that a `.csv` that trains the network has.
        name: of the argument or flag that gives `source`, for messages.
        takes_missing: whether the networks can do without some channels; others refuse a case that lacks one
            when they read it, and the first channel may be missing only here.
        image_patterns, path_column: see `LoadedModel`.
    Raises:
        ValueError: no images, channels that no network has, or two cases with the same name.
    """
    check_source(source, name)
    path, choice = choice_of(source)
    location = InputPath(path, name)
    cases: list[Case] = []
    if path.is_dir():
        if image_patterns:
            cases = _by_patterns(location, image_patterns)
        cases = cases or _in_folder(location, num_channels, takes_missing)
        if cases[0].images[0].name.endswith(suffixes()):
            _warn_of_series(location)
    elif not path.exists() and patterns.is_pattern(path):
        cases = [Case(case_id, (file,)) for case_id, file in patterns.files_of(path, name).items()]
    elif path.suffix == ".txt":
        cases = _named(location, read_text_list(location))
    elif path.suffix == ".json":
        cases = _named(location, read_json(location))
    elif path.suffix == ".csv":
        cases = _named(location, read_table(location, answers, path_column))
    else:
        cases = [_single(location, num_channels)]
    for case in cases:
        error = id_error(case.id)
        if error:
            raise ValueError(f"{location}: {error}")
    if choice:
        return [_with_choice(case, choice, name) for case in cases]
    return cases


def check_source(source: Path, name: str) -> None:
    """A quick check; `find_cases` looks at what is in it.

    Raises:
        ValueError: no file, folder or pattern.
    """
    if not (choice_of(source)[0].exists() or patterns.is_pattern(source)):
        raise ValueError(f"{name} {source}: no such file or folder")


def _by_patterns(source: InputPath, image_patterns: Sequence[str]) -> list[Case]:
    """The cases of a folder by the patterns of the training images; none if no file matches."""
    channels = [
        patterns.matching_files(f"{source.path}/{pattern}", source.name) for pattern in image_patterns
    ]
    cases = []
    for case_id in sorted({case_id for files in channels for case_id in files}):
        missing = tuple(number for number, files in enumerate(channels) if case_id not in files)
        images = tuple(files[case_id] for files in channels if case_id in files)
        cases.append(Case(case_id, images, missing_channels=missing))
    if cases:
        _note_skipped(source, image_patterns, [path for case in cases for path in case.images])
    return cases


def _note_skipped(source: InputPath, image_patterns: Sequence[str], taken: Sequence[Path]) -> None:
    names = ", ".join(image_patterns)
    log.info("%s: %d images named as in training, %s", source, len(taken), names)
    taken_names = {path.name for path in taken}
    skipped = [
        path.name
        for path in source.path.iterdir()
        if path.name.lower().endswith(suffixes())
        and path.name not in taken_names
        and not path.name.startswith(".")
    ]
    if skipped:
        log.warning("%s: skipped images with other names: %s", source, some(sorted(skipped)))


def _with_choice(case: Case, choice: str, name: str) -> Case:
    for path in case.images:
        if known_by_content(path) is None:
            raise ValueError(f"{name}: {choice} takes a volume of a DICOM series, which {path} is not")
    return replace(case, images=tuple(Path(f"{path}{choice}") for path in case.images))


def _in_folder(source: InputPath, num_channels: int, takes_missing: bool) -> list[Case]:
    names = [path.name for path in source.path.iterdir()]
    if not any(name.endswith(volume_suffixes()) for name in names):
        finders = [image_format.cases for image_format in formats() if image_format.cases is not None]
        for find in finders:
            entries = [
                ListedCase(case_id, (str(path.absolute()),))
                for case_id, path in find(source.path, source.name)
            ]
            if entries:
                return _named(source, entries)
        # Neither volumes nor DICOM: only pictures are left.
        if not any(name.endswith(suffixes()) for name in names):
            others = ", nor DICOM below" if finders else f"; {DICOM_IS_MISSING}"
            below = [path for path in source.path.glob("*/*") if path.name.endswith(suffixes())]
            if below:
                ending = below[0].name.removeprefix(stem(below[0]))
                others = f"; those in its folders are {source.path}/*/{{id}}{ending}"
            raise ValueError(f"{source}: no image there ({suffix_list()}){others}")
    files = list(in_folder(source.path, source.name).values())
    # Of each case the first channel may be missing; but files that hold all channels have any numbers.
    have_numbers = takes_missing and all(channel_of(path, num_channels) is not None for path in files)
    are_channels = have_numbers and image_channels(files[0]) == 1
    if are_channels or any(stem(path).endswith(_FIRST_CHANNEL) for path in files):
        count = num_files(files[0], num_channels)
        channels = group_channels(files, count)
        return [
            # By the numbers in their names.
            Case(case_id, tuple(paths), missing_channels=missing_numbers(paths, count))
            for case_id, paths in channels.items()
        ]
    return [Case(stem(path), (path,)) for path in files]


def _warn_of_series(source: InputPath) -> None:
    """Of a study, beside whose folders somebody has put a volume."""
    finders = [image_format.cases for image_format in formats() if image_format.cases is not None]
    folders = [path for path in source.path.iterdir() if path.is_dir() and not path.name.startswith(".")]
    names = [folder.name for folder in folders if any(_has_series(find, folder) for find in finders)]
    if names:
        log.warning(
            "%s: DICOM series are not read, as volumes of another format stand beside their folders: %s",
            source,
            some(sorted(names)),
        )


def _has_series(find: Callable[[Path, str], list[Any]], folder: Path) -> bool:
    try:
        return bool(find(folder, folder.name))
    except ValueError:  # of several modalities, or one that cannot be read
        return True


def _single(source: InputPath, num_channels: int) -> Case:
    """The case of one file; for `CASE_0000`, with the other channels beside it."""
    path = source.path
    case_id = name_of(path)
    if not stem(path).endswith(_FIRST_CHANNEL):
        return Case(case_id, (path,))
    suffix = path.name.removeprefix(stem(path))
    count = num_files(path, num_channels)
    channels = tuple(path.with_name(f"{case_id}_{number:04d}{suffix}") for number in range(count))
    found = tuple(path for path in channels if path.is_file())
    return Case(case_id, found, missing_channels=missing_numbers(found, count))


def _named(source: InputPath, entries: Sequence[ListedCase]) -> list[Case]:
    """The cases of a list; paths are relative to its folder."""
    folder = source.path.parent
    cases: dict[str, Case] = {}
    for entry in entries:
        numbered_paths = [
            (number, folder / path) for number, path in enumerate(entry.paths) if path is not None
        ]
        paths = tuple(path for _, path in numbered_paths)
        number, first = numbered_paths[0]
        case_id = entry.case_id if entry.case_id is not None else name_of(first, number)
        if case_id in cases:
            by_file_name = entry.case_id is None or source.path.is_dir()
            advice = "; a JSON object gives them ids" if by_file_name else ""
            raise ValueError(f"{source}: two cases are called {case_id}{advice}")
        missing_channels = tuple(number for number, path in enumerate(entry.paths) if path is None)
        cases[case_id] = Case(case_id, paths, missing_channels=missing_channels)
    if not cases:
        raise ValueError(f"{source}: no cases found")
    return list(cases.values())


def name_of(first: Path, number: int = 0) -> str:
    """The id of a case from its first file's name, without `_0000`, as for the files of a dataset.

    Args: number: of the channel that the file is.
    """
    return stem(first).removesuffix(f"_{number:04d}")
