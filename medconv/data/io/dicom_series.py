"""The DICOM series of a folder: frames by their headers, skipped files and unreadable files.

A path is the folder of a series, or one file, which means its whole series in that folder.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from medconv.data.io.dicom_headers import Frame, choice_of, frames_of, list_files
from medconv.utils.optional_imports import needed


class FolderContent(NamedTuple):
    """Args: series: the frames of each series. skipped: file name to reason. broken: file to error."""

    series: tuple[tuple[Frame, ...], ...]
    skipped: dict[str, str]
    broken: dict[Path, str]


def find_series(folder: Path) -> FolderContent:
    """Read all headers; the result is cached until a file in the folder changes.

    Raises: ValueError: pydicom is not installed.
    """
    needed("pydicom", "dicom", "reading DICOM", folder)
    return _find_series(folder, list_files(folder))


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
    return FolderContent(tuple(map(tuple, series.values())), skipped, broken)


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
    folder = path if path.is_dir() else path.parent
    files = list_files(folder)
    if folder != path:
        here = (frames for frames in find_series(folder).series if any(f.path == path for f in frames))
        ours = {path.name, *(frame.path.name for frames in here for frame in frames)}
        files = tuple(file for file in files if file[0] in ours)
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
    folder = path if path.is_dir() else path.parent
    content = find_series(folder)
    if path in content.broken:
        raise ValueError(content.broken[path])
    if path.name in content.skipped and folder != path:
        raise ValueError(f"{path}: {content.skipped[path.name]}, expected grey values")
    here = [s for s in content.series if folder == path or any(frame.path == path for frame in s)]
    if content.broken and (folder == path or any(len(frames) > 1 for frames in here)):
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
