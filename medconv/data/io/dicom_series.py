"""Which DICOM series a folder holds: files by their headers, what is left out of them, and what cannot be
read.

A path is a series' folder, or a file, which stands for all of its series in that folder.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from medconv.data.io.dicom_headers import Frame, frames_of, listing
from medconv.utils.optional_imports import needed


class Found(NamedTuple):
    """What a folder holds.

    Args: series: the frames of each. left_out: file name to why. broken: file to what is wrong with it.
    """

    series: tuple[tuple[Frame, ...], ...]
    left_out: dict[str, str]
    broken: dict[Path, str]


def find(folder: Path) -> Found:
    """Read all headers; what is remembered of a folder holds until one of its files changes.

    Raises: ValueError: pydicom is not installed.
    """
    needed("pydicom", "dicom", "reading DICOM", folder)
    return _find(folder, listing(folder))


@lru_cache(maxsize=8)
def _find(folder: Path, files: tuple[tuple[str, int, int], ...]) -> Found:
    series: dict[str, list[Frame]] = defaultdict(list)
    left_out, broken = {}, {}
    for name, *_ in files:
        try:
            frames, reason = frames_of(folder / name)
        except ValueError as error:
            broken[folder / name] = str(error)
            continue
        except OSError as error:
            broken[folder / name] = f"{folder / name}: cannot be read ({error.strerror})"
            continue
        if reason:
            left_out[name] = reason
        for frame in frames:
            series[frame.series].append(frame)
    return Found(tuple(map(tuple, series.values())), left_out, broken)


def cases(found: Found, folder: Path) -> list[tuple[str, Path, str]]:
    """The series of a folder: what each is called beside the others ("" of a single one), a path that stands
    for it, and its modality. A file that is broken is one of them, so that it is named when it is read."""
    if len(found.series) < 2:
        modality = found.series[0][0].modality if found.series else ""
        return [("", folder, modality)] if found.series or found.broken else []
    named = [(_name(frames), frames[0].path, frames[0].modality) for frames in found.series]
    return named + [(_stem(path), path, "") for path in found.broken]


def _name(frames: Sequence[Frame]) -> str:
    """Of a series of one file that file's, as with radiographs; else number and description."""
    if len({frame.path for frame in frames}) == 1:
        return _stem(frames[0].path)
    return re.sub(r"[^\w.-]+", "_", frames[0].title).strip("_.") or "series"


def _stem(path: Path) -> str:
    """Names are often UIDs, whose last number is no ending."""
    return path.stem if path.suffix.lower() in (".dcm", ".dicom", ".ima") else path.name


def stamp(path: Path) -> list[int]:
    """Of the files that a path stands for: how many bytes, and a checksum of names, sizes and times of
    change.

    Of a folder no file is opened. Raises: OSError.
    """
    folder = path if path.is_dir() else path.parent
    files = listing(folder)
    if folder != path:
        ours = {
            path.name,
            *(f.path.name for s in find(folder).series if any(f.path == path for f in s) for f in s),
        }
        files = tuple(file for file in files if file[0] in ours)
    return [sum(size for _, size, _ in files), zlib.crc32(repr(files).encode())]


def words(left_out: dict[str, str]) -> str:
    """Such as `3 files, such as IM1: a localizer`."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in left_out.items():
        by_reason[reason].append(name)
    return "; ".join(f"{len(names)} such as {names[0]}: {reason}" for reason, names in by_reason.items())


def frames_at(path: Path) -> tuple[Frame, ...]:
    """All frames of the series that a path stands for.

    Raises: ValueError: it is none, one of several in its folder, or one that may lack a slice that cannot be
    read.
    """
    if path.name.upper() == "DICOMDIR" and not path.is_dir():
        raise ValueError(f"{path}: a list of files, expected an image or a series; give its folder")
    folder = path if path.is_dir() else path.parent
    found = find(folder)
    if path in found.broken:
        raise ValueError(found.broken[path])
    if path.name in found.left_out and folder != path:
        raise ValueError(f"{path}: {found.left_out[path.name]}, expected grey values")
    here = [
        frames for frames in found.series if folder == path or any(frame.path == path for frame in frames)
    ]
    if found.broken and (
        folder == path or any(len(frames) > 1 for frames in here)
    ):  # it may be one of the slices
        raise ValueError(next(iter(found.broken.values())))
    if len(here) > 1:
        titles = ", ".join(
            f"{s[0].title or 'unnamed'} ({s[0].modality}, {len(s)} slices, {s[0].path.name})" for s in here
        )
        raise ValueError(
            f"{path}: {len(here)} series in one folder, expected one: {titles}; a file stands for its series"
        )
    if not here:
        raise ValueError(
            f"{path}: no slice of a volume there, expected one series; left out: {words(found.left_out)}"
        )
    return here[0]
