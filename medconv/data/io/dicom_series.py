"""The DICOM series of a folder: frames by their headers, skipped files and unreadable files.

A path is the folder of a series, or one file, which means its whole series in that folder.
"""

import re
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from medconv.data.io.dicom_headers import Frame, choice_of, frames_of, list_files
from medconv.utils.optional_imports import needed

_SETTLED = 2_000_000_000  # ns after which a change of a folder has another time of modification
_locks = tuple(Lock() for _ in range(64))  # threads that need one folder wait for the first to read it
_recent: dict[Path, tuple[int, "FolderContent"]] = {}  # folder to its time of modification and its content


class FolderContent(NamedTuple):
    """Args: series: the frames of each series. by_path: the series of a file. skipped: file name to reason.
    broken: file to error. files: name to name, size and time of modification.
    """

    series: tuple[tuple[Frame, ...], ...]
    by_path: dict[Path, list[tuple[Frame, ...]]]
    skipped: dict[str, str]
    broken: dict[Path, str]
    files: dict[str, tuple[str, int, int]]


def find_series(folder: Path) -> FolderContent:
    """Read all headers; the result is cached until a file in the folder changes.

    Raises: ValueError: pydicom is not installed.
    """
    needed("pydicom", "dicom", "reading DICOM", folder)
    files = list_files(folder)
    with _locks[hash(folder) % len(_locks)]:
        return _find_series(folder, files)


@lru_cache(maxsize=8)
def _find_series(folder: Path, files: tuple[tuple[str, int, int], ...]) -> FolderContent:
    series: dict[str, list[Frame]] = defaultdict(list)
    skipped, broken = {}, {}
    for name, *_ in files:
        try:
            frames, reason = frames_of(folder / name)
        except ValueError as error:
            broken[folder / name] = str(error)
            continue
        if reason:
            skipped[name] = reason
        for frame in frames:
            series[frame.series].append(frame)
    by_path: dict[Path, list[tuple[Frame, ...]]] = defaultdict(list)
    found = tuple(map(tuple, series.values()))
    for one in found:
        for path in {frame.path for frame in one}:
            by_path[path].append(one)
    return FolderContent(found, dict(by_path), skipped, broken, {file[0]: file for file in files})


def _around(file: Path) -> FolderContent:
    """What `find_series` finds in a file's folder, which may have thousands of other series.

    So not all of its files are examined for each of them: one that is added, removed or renamed changes the
    folder's time of modification; written anew in place, those of the file's own series are noticed.
    """
    folder = file.parent
    modified = folder.stat().st_mtime_ns
    known = _recent.get(folder)
    if known is not None and known[0] == modified and _unchanged(known[1], file):
        return known[1]
    content = find_series(folder)
    if time.time_ns() - modified > _SETTLED:
        _recent[folder] = modified, content
        for other in list(_recent)[:-8]:
            _recent.pop(other, None)
    return content


def _unchanged(content: FolderContent, file: Path) -> bool:
    for known in (content.files[name] for name in _files_of(content, file) if name in content.files):
        stat = (file.parent / known[0]).stat()
        if known[1:] != (stat.st_size, stat.st_mtime_ns):
            return False
    return True


def _files_of(content: FolderContent, file: Path) -> list[str]:
    """The names of a file and of the others of its series."""
    frames = (frame for series in content.by_path.get(file, ()) for frame in series)
    return sorted({file.name, *(frame.path.name for frame in frames)})


def cases(content: FolderContent, folder: Path) -> list[tuple[str, Path, str]]:
    """The series of a folder: a name ("" for a single series), a path, and the modality. Broken files are
    included, so that reading them gives an error that names them."""
    if len(content.series) < 2:
        modality = content.series[0][0].modality if content.series else ""
        return [("", folder, modality)] if content.series or content.broken else []
    named = [(_name(frames), frames[0].path, frames[0].modality) for frames in content.series]
    return named + [(_stem(path), path, "") for path in content.broken]


def _name(frames: Sequence[Frame]) -> str:
    """The name of the file if there is only one, as with radiographs; else number and description."""
    if len({frame.path for frame in frames}) == 1:
        return _stem(frames[0].path)
    return re.sub(r"[^\w.-]+", "_", frames[0].title).strip("_.") or "series"


def _stem(path: Path) -> str:
    """File names are often UIDs; their last number is not a suffix."""
    return path.stem if path.suffix.lower() in (".dcm", ".dicom", ".ima") else path.name


def stamp(path: Path) -> list[int]:
    """Of the files of a series: total bytes, and a checksum of names, sizes and modification times.

    For a folder no file is opened. Raises: OSError.
    """
    path, _ = choice_of(path)
    if path.is_dir():
        files = list_files(path)
    else:
        content = _around(path)
        files = tuple(content.files[name] for name in _files_of(content, path) if name in content.files)
    return [sum(size for _, size, _ in files), zlib.crc32(repr(files).encode())]


def summarize(skipped: dict[str, str]) -> str:
    """Skipped files by reason, such as `3 such as IM1: a localizer`."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in skipped.items():
        by_reason[reason].append(name)
    return "; ".join(f"{len(names)} such as {names[0]}: {reason}" for reason, names in by_reason.items())


def frames_at(path: Path) -> tuple[Frame, ...]:
    """All frames of the series at a path.

    Raises: ValueError: not a series, one of several in its folder, or a slice may be unreadable.
    """
    if path.name.upper() == "DICOMDIR" and not path.is_dir():
        raise ValueError(f"{path}: a list of files, expected an image or a series; pass its folder")
    is_folder = path.is_dir()
    content = find_series(path) if is_folder else _around(path)
    if path in content.broken:
        raise ValueError(content.broken[path])
    if path.name in content.skipped and not is_folder:
        raise ValueError(f"{path}: {content.skipped[path.name]}, expected grey values")
    here = content.series if is_folder else content.by_path.get(path, ())
    if content.broken and (is_folder or any(len(frames) > 1 for frames in here)):
        raise ValueError(next(iter(content.broken.values())))  # it may be one of the slices
    if len(here) > 1:
        slices = [(s[0], f"{len(s)} slices") for s in here]
        titles = ", ".join(f"{f.title or 'unnamed'} ({f.modality}, {n}, {f.path.name})" for f, n in slices)
        found = f"{len(here)} series in one folder, expected one"
        raise ValueError(f"{path}: {found}: {titles}; a file selects its series")
    if not here:
        raise ValueError(
            f"{path}: no slice of a volume there, expected one series; skipped: {summarize(content.skipped)}"
        )
    return here[0]
