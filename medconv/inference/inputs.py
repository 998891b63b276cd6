"""The cases of `--input`: a file, a folder of images or of DICOM, a pattern, or a list of files."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from medconv.data.case import Case
from medconv.data.datasets import patterns
from medconv.data.datasets.common import id_error
from medconv.data.datasets.csv_table import read_rows, row_ids
from medconv.data.datasets.nnunet import group_channels
from medconv.data.io import dicom_series
from medconv.data.io.dicom_headers import choice_of, is_dicom, list_files
from medconv.data.io.images import in_folder, known, stem, suffixes, volume_suffixes
from medconv.utils.errors import explained

_FIRST = "_0000"  # the ending of the first channel's name
Entry = tuple[str | None, tuple[str, ...]]  # a case id, or None, and its files
log = logging.getLogger(__name__)


def find_cases(source: Path, num_channels: int, answers: Sequence[str] = ()) -> list[Case]:
    """The cases in a file, a folder, a pattern with `{id}` or a list; channels are files CASE_0000,
    CASE_0001, ... or in one file.

    In a folder where some name ends in `_0000`, all files must be such channels. Without volumes of another
    format each DICOM series is a case, in subfolders too; without either, pictures are read.

    Lists: `.csv` has a row for each image, with its file in the column `path`; `.txt` has a case in each
    line, its channels separated by tabs; `.json` is an array of cases (a path, or an array of paths), or
    an object of case id to such cases. Paths are relative to the list's folder.
    `#2` or `#b=50` at the end of `source` takes one volume of each DICOM series.
    Args: answers: columns of labels that a `.csv` that trains the network has.
    Raises: ValueError: no images, missing channels, or two cases with the same name.
    """
    check_source(source)
    source, choice = choice_of(source)
    if choice:
        return [_with_choice(case, choice) for case in find_cases(source, num_channels, answers)]
    if patterns.is_pattern(source) and not source.exists():
        found = patterns.files_of(source, "--input")
        return [Case(_checked(case, source), (path,)) for case, path in found.items()]
    if source.is_file():
        readers: dict[str, Callable[[Path], list[Entry]]] = {
            ".txt": _lines,
            ".json": _json,
            ".csv": partial(_table, answers=answers),
        }
        reader = readers.get(source.suffix)
        return [_single(source, num_channels)] if reader is None else _named(source, reader(source))
    if not any(path.name.endswith(volume_suffixes()) for path in source.iterdir()):
        if cases := _in_dicom(source):
            return cases
        if not any(path.name.endswith(suffixes()) for path in source.iterdir()):
            raise ValueError(f"--input {source}: no image there ({known()}), nor DICOM below")
    files = list(in_folder(source, "--input").values())
    separate = any(stem(path).endswith(_FIRST) for path in files)
    channels = group_channels(files, num_channels) if separate else {stem(path): (path,) for path in files}
    return [Case(_checked(case, source), paths) for case, paths in channels.items()]


def check_source(source: Path) -> None:
    """Raises: ValueError: no file, folder or pattern. It is quick: `find_cases` looks at what is in it."""
    if not (patterns.is_pattern(source) or choice_of(source)[0].exists()):
        raise ValueError(f"--input {source}: no such file or folder")


def _with_choice(case: Case, choice: str) -> Case:
    if others := [path for path in case.images if not is_dicom(path)]:
        raise ValueError(f"--input: {choice} takes a volume of a DICOM series, and {others[0]} is none")
    return replace(case, images=tuple(Path(f"{path}{choice}") for path in case.images))


def _in_dicom(source: Path) -> list[Case]:
    """A case for each series, named after its folder below `source`, and by number and description if needed.

    Localizers, colour images and files that are not images are skipped.
    Raises: ValueError: series of several modalities, two with the same name, or a folder that cannot be read.
    """
    entries: list[Entry] = []
    modalities: dict[str, str] = {}  # to its first case
    without_dicom: list[Path] = []
    for folder in (source, *sorted(path for path in source.rglob("*") if path.is_dir())):
        inside = folder.relative_to(source).parts
        if any(part.startswith(".") for part in inside):
            continue
        if not is_dicom(folder):
            without_dicom.append(folder)
            continue
        series = dicom_series.find_series(folder)
        if series.skipped:
            log.info("--input %s: skipped %s", folder, dicom_series.summarize(series.skipped))
        for name, path, modality in dicom_series.cases(series, folder):
            case = "_".join(filter(None, (*inside, name))) or source.resolve().name
            entries.append((case, (str(path.absolute()),)))
            if modality:
                modalities.setdefault(modality, case)
    if len(modalities) > 1:
        kinds = ", ".join(f"{name} (such as {case})" for name, case in modalities.items())
        raise ValueError(
            f"--input {source}: series of several modalities, {kinds}; expected one, or a list (.txt, .json) "
            "of one modality"
        )
    for folder in without_dicom if entries else ():
        with explained(f"--input {source}: {folder} cannot be read", OSError):
            files = list_files(folder)
        if files:
            what = "--input %s: skipped %s, no file there can be read as DICOM (DICM after 128 bytes)"
            log.warning(what, source, folder)
    return _named(source, entries) if entries else []


def _single(path: Path, num_channels: int) -> Case:
    """The case of one file; for `CASE_0000`, with the other channels beside it."""
    case, ending = _checked(name_of(path), path), path.name.removeprefix(stem(path))
    if not stem(path).endswith(_FIRST):
        return Case(case, (path,))
    channels = tuple(path.with_name(f"{case}_{number:04d}{ending}") for number in range(num_channels))
    if missing := [channel.name for channel in channels if not channel.is_file()]:
        absent = ", ".join(missing)
        raise ValueError(f"--input {path}: the network takes {num_channels} channels, {absent} is not there")
    return Case(case, channels)


def _lines(source: Path) -> list[Entry]:
    lines = [line.strip() for line in _text(source).splitlines()]
    return [(None, tuple(line.split("\t"))) for line in lines if line and not line.startswith("#")]


def _table(source: Path, answers: Sequence[str]) -> list[Entry]:
    """A row for each image, as `data=csv` reads them."""
    header, rows = read_rows(source)
    if "path" not in header:
        raise ValueError(f"--input {source}: no column 'path', it has {', '.join(header)}")
    if empty := [number for number, row in rows if not row["path"]]:
        raise ValueError(f"--input {source}, row {empty[0]}: column 'path' is empty, expected an image file")
    ids = row_ids(source, header, [row for _, row in rows], others=answers)
    return [(case, (row["path"],)) for case, (_, row) in zip(ids, rows, strict=True)]


def _json(source: Path) -> list[Entry]:
    text = _text(source)
    with explained(f"--input {source}: not JSON", ValueError, RecursionError):
        # tuples of pairs, since a dict would lose a key that occurs twice
        content = json.loads(text, object_pairs_hook=tuple)
    if isinstance(content, list):
        content = [(None, item) for item in content]
    elif not isinstance(content, tuple):
        raise ValueError(f"--input {source}: expected an array of cases, or an object of case id to files")
    return [(case, _paths(item, source)) for case, item in content]


def _paths(item: Any, source: Path) -> tuple[str, ...]:
    paths = [item] if isinstance(item, str) else item
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        what = "a case is a path, or an array of paths, one per channel"
        raise ValueError(f"--input {source}: {what}; got {item!r:.80}")
    return tuple(paths)


def _text(source: Path) -> str:
    with explained(f"--input {source}: cannot be read as text", OSError, UnicodeDecodeError):
        return source.read_text(encoding="utf-8-sig")


def _named(source: Path, entries: Sequence[Entry]) -> list[Case]:
    cases: dict[str, Case] = {}
    for case_id, paths in entries:
        case = _checked(name_of(source.parent / paths[0]) if case_id is None else case_id, source)
        if case in cases:
            advice = "; a JSON object gives them ids" if case_id is None or source.is_dir() else ""
            raise ValueError(f"--input {source}: two cases are called {case}{advice}")
        cases[case] = Case(case, tuple(source.parent / path for path in paths))
    if not cases:
        raise ValueError(f"--input {source}: no case in it")
    return list(cases.values())


def name_of(first: Path) -> str:
    """The id of a case from its first file's name, without `_0000`, as for the files of a dataset."""
    return stem(first).removesuffix(_FIRST)


def _checked(case: str, source: Path) -> str:
    if error := id_error(case):
        raise ValueError(f"--input {source}: {error}")
    return case
