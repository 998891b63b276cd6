"""Which cases `--input` means: a file, a folder of images or of DICOM, or a list of files."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medconv.data.case import Case
from medconv.data.datasets.common import ids_of
from medconv.data.datasets.csv_table import read_rows
from medconv.data.datasets.nnunet import group_channels
from medconv.data.io import dicom_series
from medconv.data.io.dicom_headers import is_dicom, list_files
from medconv.data.io.images import KNOWN, SUFFIXES, VOLUMES, in_folder, stem

_FIRST = "_0000"  # how the first channel's name ends
_LONGEST = (
    200  # bytes of an id; most file systems allow names of 255, and a file being written has a longer one
)
log = logging.getLogger(__name__)


def find_cases(source: Path, num_channels: int) -> list[Case]:
    """The cases in a file, a folder or a list; channels are files CASE_0000, CASE_0001, ... or one file has
    them all.

    A folder with some name that ends in `_0000` holds such channels and nothing else. One without volumes of
    another format, but with DICOM in it or below it, has a case in each series. Pictures count where there is
    nothing else.

    Lists: `.csv` has a row for each image, whose column `path` names its file; `.txt` has a case in each
    line, its channels divided by tabs; `.json` is an array of such cases (a path, or an array of paths), or
    an object of case id to them. Paths are relative to the list's folder.
    Raises: ValueError: nothing there, channels missing, or two cases of one name.
    """
    if not source.exists():
        raise ValueError(f"--input {source}: no such file or folder")
    if source.is_file():
        lists = {".txt": _lines, ".json": _json, ".csv": _table}
        return (
            _named(source, lists[source.suffix](source))
            if source.suffix in lists
            else [_single(source, num_channels)]
        )
    if not any(path.name.endswith(VOLUMES) for path in source.iterdir()):
        if found := _in_dicom(source):
            return found
        if not any(path.name.endswith(SUFFIXES) for path in source.iterdir()):
            raise ValueError(f"--input {source}: no image there ({KNOWN}), nor DICOM below")
    files = list(in_folder(source, "--input").values())
    if any(stem(path).endswith(_FIRST) for path in files):
        channels = group_channels(files, num_channels)
    else:
        channels = {stem(path): (path,) for path in files}
    return [Case(_checked(case, source), paths) for case, paths in channels.items()]


def _in_dicom(source: Path) -> list[Case]:
    """A case for each series, called as its folder below `source`; of several in one folder, by number and
    description.

    Localizers, colour images and what is no image are left out.
    Raises: ValueError: series of several modalities, or two that would be called the same.
    """
    entries: list[tuple[str | None, tuple[str, ...]]] = []
    modalities: dict[str, list[str]] = {}
    below = sorted(path for path in source.rglob("*") if path.is_dir())
    without: list[Path] = []
    for folder in (source, *below):
        if any(part.startswith(".") for part in folder.relative_to(source).parts):
            continue
        if not is_dicom(folder):
            without.append(folder)
            continue
        found = dicom_series.find_series(folder)
        if found.skipped:
            log.info("--input %s: left out %s", folder, dicom_series.summarize(found.skipped))
        for name, path, modality in dicom_series.cases(found, folder):
            case = (
                "_".join([*folder.relative_to(source).parts, *([name] if name else [])])
                or source.resolve().name
            )
            entries.append((case, (str(path.absolute()),)))
            modalities.setdefault(modality, []).append(case)
    modalities.pop("", None)
    if len(modalities) > 1:
        kinds = ", ".join(f"{name} (such as {cases[0]})" for name, cases in modalities.items())
        raise ValueError(
            f"--input {source}: series of several modalities, {kinds}; expected one, or a list (.txt, .json) "
            "of those meant"
        )
    if entries:
        _say_without(source, without)
    return _named(source, entries) if entries else []


def _say_without(source: Path, folders: Sequence[Path]) -> None:
    """That files in these folders are left out. Raises: ValueError: a folder beside DICOM cannot be looked
    into.
    """
    for folder in folders:
        try:
            if list_files(folder):
                log.warning(
                    "--input %s: left out %s, no file there can be read as DICOM (DICM after 128 bytes)",
                    source,
                    folder,
                )
        except OSError as error:
            raise ValueError(
                f"--input {source}: {error.filename or folder} cannot be read ({error.strerror})"
            ) from error


def _single(path: Path, num_channels: int) -> Case:
    """A file; of `CASE_0000` also the other channels beside it."""
    case, ending = _checked(_name(path), path), path.name.removeprefix(stem(path))
    if not stem(path).endswith(_FIRST):
        return Case(case, (path,))
    channels = tuple(path.with_name(f"{case}_{number:04d}{ending}") for number in range(num_channels))
    if lacking := [channel.name for channel in channels if not channel.is_file()]:
        raise ValueError(
            f"--input {path}: the network takes {num_channels} channels, {', '.join(lacking)} is not there"
        )
    return Case(case, channels)


def _lines(source: Path) -> list[tuple[str | None, tuple[str, ...]]]:
    lines = [line.strip() for line in _text(source).splitlines()]
    return [(None, tuple(line.split("\t"))) for line in lines if line and not line.startswith("#")]


def _table(source: Path) -> list[tuple[str | None, tuple[str, ...]]]:
    """A row for each image, as `data=csv` reads them."""
    header, rows = read_rows(source)
    if "path" not in header:
        raise ValueError(f"--input {source}: no column 'path', it has {', '.join(header)}")
    if empty := [number for number, row in rows if not row["path"]]:
        raise ValueError(f"--input {source}, row {empty[0]}: column 'path' is empty, expected an image file")
    files = [source.parent / row["path"] for _, row in rows]
    ids = [row["case"] for _, row in rows] if "case" in header else ids_of(files, source.parent, source)
    return [(case, (row["path"],)) for case, (_, row) in zip(ids, rows, strict=True)]


def _json(source: Path) -> list[tuple[str | None, tuple[str, ...]]]:
    try:
        content = json.loads(
            _text(source), object_pairs_hook=tuple
        )  # a dict would lose a key that comes twice
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--input {source}: not JSON ({error})") from error
    entries = content if isinstance(content, tuple) else ((None, item) for item in _array(content, source))
    return [(case, _paths(item, source)) for case, item in entries]


def _paths(item: Any, source: Path) -> tuple[str, ...]:
    paths = [item] if isinstance(item, str) else item
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ValueError(
            f"--input {source}: a case is a path, or an array of paths, one per channel; got {item!r:.80}"
        )
    return tuple(paths)


def _array(content: Any, source: Path) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"--input {source}: expected an array of cases, or an object of case id to files")
    return content


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--input {source}: cannot be read as text ({error})") from error


def _named(source: Path, entries: Sequence[tuple[str | None, tuple[str, ...]]]) -> list[Case]:
    cases: dict[str, Case] = {}
    for given, paths in entries:
        case = _checked(_name(source.parent / paths[0]) if given is None else given, source)
        if case in cases:
            advice = "; a JSON object gives them ids" if given is None or source.is_dir() else ""
            raise ValueError(f"--input {source}: two cases are called {case}{advice}")
        cases[case] = Case(case, tuple(source.parent / path for path in paths))
    if not cases:
        raise ValueError(f"--input {source}: no case in it")
    return list(cases.values())


def _name(first: Path) -> str:
    """Of a case without an id: that of its first file, without `_0000`, as the files of a dataset are
    called.
    """
    return stem(first).removesuffix(_FIRST)


def _checked(case: str, source: Path) -> str:
    try:
        size = len(os.fsencode(case))
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _LONGEST or Path(case).name != case or case[0] == "." or min(case) < " ":
        shown = repr(case) if len(case) <= _LONGEST else f"one of {size} bytes, {case[:20]!r}..."
        raise ValueError(
            f"--input {source}: a case id names a file, of at most {_LONGEST} bytes, and cannot be {shown}"
        )
    return case
