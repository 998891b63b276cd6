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

from medconv.data.io.formats import choice_of
from medconv.features.dicom.files import list_files
from medconv.features.dicom.headers import Frame, frames_of
from medconv.utils.optional_imports import needed

Series = tuple[Frame, ...]
_FileStamp = tuple[str, int, int]  # name, size in bytes and modification time in ns

_MAX_FOLDERS = 8  # whose content is kept
# A folder that changed less than 2 s (in ns) ago may change again within the clock's resolution
_CLOCK_MARGIN_NS = 2_000_000_000
# Threads that need the same folder wait for the first to read it
_locks = tuple(Lock() for _ in range(64))
# Folder to its modification time in ns and its content
_recent: dict[Path, tuple[int, "FolderContent"]] = {}


class FolderContent(NamedTuple):
    """What a folder holds.

    Args:
        series: the frames of each series.
        by_path: file to its series; an enhanced file may have several.
        skipped: file name to the reason.
        broken: file to its error.
        files: file name to name, size and modification time.
    """

    series: tuple[Series, ...]
    by_path: dict[Path, list[Series]]
    skipped: dict[str, str]
    broken: dict[Path, str]
    files: dict[str, _FileStamp]


def find_series(folder: Path) -> FolderContent:
    """Read all headers of a folder; the result is cached until a file in the folder changes.

    Raises:
        ValueError: pydicom is not installed.
    """
    needed("pydicom", "dicom", "reading DICOM", folder)
    files = list_files(folder)
    with _locks[hash(folder) % len(_locks)]:
        return _read_headers(folder, files)


@lru_cache(maxsize=_MAX_FOLDERS)
def _read_headers(folder: Path, files: tuple[_FileStamp, ...]) -> FolderContent:
    frames_by_uid: dict[str, list[Frame]] = defaultdict(list)
    skipped: dict[str, str] = {}
    broken: dict[Path, str] = {}
    for name, *_ in files:
        try:
            frames, skip_reason = frames_of(folder / name)
        except ValueError as error:
            broken[folder / name] = str(error)
            continue
        if skip_reason:
            skipped[name] = skip_reason
        for frame in frames:
            frames_by_uid[frame.series].append(frame)
    all_series = tuple(tuple(frames) for frames in frames_by_uid.values())
    by_path: dict[Path, list[Series]] = defaultdict(list)
    for series in all_series:
        for path in {frame.path for frame in series}:
            by_path[path].append(series)
    return FolderContent(
        series=all_series,
        by_path=dict(by_path),
        skipped=skipped,
        broken=broken,
        files={file[0]: file for file in files},
    )


def _find_around(file: Path) -> FolderContent:
    """`find_series` of a file's folder, without listing the folder again for each of its series.

    A folder may have thousands of series. A file that is added, removed or renamed changes the folder's
    modification time; one that is overwritten in place is noticed if it is of the same series.
    """
    folder = file.parent
    modified_ns = folder.stat().st_mtime_ns
    recent = _recent.get(folder)
    if recent is not None:
        recent_ns, recent_content = recent
        if recent_ns == modified_ns and _is_unchanged(recent_content, file):
            return recent_content
    content = find_series(folder)
    if time.time_ns() - modified_ns > _CLOCK_MARGIN_NS:
        _recent[folder] = modified_ns, content
        for oldest in list(_recent)[:-_MAX_FOLDERS]:
            _recent.pop(oldest, None)  # another thread may have removed it
    return content


def _is_unchanged(content: FolderContent, file: Path) -> bool:
    """Whether the files of a file's series have the same size and modification time as before."""
    for name, size, modified_ns in _stamps_of_series(content, file):
        status = (file.parent / name).stat()
        if (size, modified_ns) != (status.st_size, status.st_mtime_ns):
            return False
    return True


def _stamps_of_series(content: FolderContent, file: Path) -> list[_FileStamp]:
    """The stamps of a file and of the other files of its series, sorted by name."""
    names = {file.name}
    for series in content.by_path.get(file, ()):
        names.update(frame.path.name for frame in series)
    return [content.files[name] for name in sorted(names) if name in content.files]


def cases(content: FolderContent, folder: Path) -> list[tuple[str, Path, str]]:
    """The series of a folder: a name ("" for a single series), a path, and the modality.

    Broken files are included, so that reading them gives an error that names them.
    """
    if len(content.series) < 2:
        if not content.series and not content.broken:
            return []
        modality = content.series[0][0].modality if content.series else ""
        return [("", folder, modality)]
    named = [(_series_name(frames), frames[0].path, frames[0].modality) for frames in content.series]
    broken = [(_stem(path), path, "") for path in content.broken]
    return named + broken


def _series_name(frames: Sequence[Frame]) -> str:
    """The name of the file if there is only one, as with radiographs; else number and description."""
    if len({frame.path for frame in frames}) == 1:
        return _stem(frames[0].path)
    return re.sub(r"[^\w.-]+", "_", frames[0].title).strip("_.") or "series"


def _stem(path: Path) -> str:
    """The file name without a suffix of DICOM.

    File names are often UIDs; their last number is not a suffix.
    """
    return path.stem if path.suffix.lower() in (".dcm", ".dicom", ".ima") else path.name


def stamp(path: Path) -> list[int]:
    """Total bytes of the files of a series, and a checksum of their names, sizes and modification times.

    For a folder no file is opened.

    Raises:
        OSError: absent.
    """
    path, _ = choice_of(path)
    files = list_files(path) if path.is_dir() else tuple(_stamps_of_series(_find_around(path), path))
    total_bytes = sum(size for _, size, _ in files)
    return [total_bytes, zlib.crc32(repr(files).encode())]


def summarize(skipped: dict[str, str]) -> str:
    """Skipped files by reason, such as `3 such as IM1: a localizer`."""
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in skipped.items():
        names_by_reason[reason].append(name)
    return "; ".join(
        f"{len(names)} such as {names[0]}: {reason}" for reason, names in names_by_reason.items()
    )


def frames_at(path: Path) -> Series:
    """All frames of the series at a path.

    Raises:
        ValueError: not a series, one of several in its folder, or a slice may be unreadable.
    """
    is_folder = path.is_dir()
    if path.name.upper() == "DICOMDIR" and not is_folder:
        raise ValueError(f"{path}: a list of files, expected an image or a series; pass its folder")
    content = find_series(path) if is_folder else _find_around(path)
    if path in content.broken:
        raise ValueError(content.broken[path])
    if path.name in content.skipped and not is_folder:
        raise ValueError(f"{path}: {content.skipped[path.name]}, expected grey values")
    candidates = content.series if is_folder else content.by_path.get(path, ())
    has_slices = is_folder or any(len(frames) > 1 for frames in candidates)
    if content.broken and has_slices:
        first_error = next(iter(content.broken.values()))
        raise ValueError(first_error)  # the file may be one of the slices
    if len(candidates) > 1:
        descriptions = ", ".join(_description(frames) for frames in candidates)
        raise ValueError(
            f"{path}: {len(candidates)} series in one folder, expected one: {descriptions}; "
            "a file selects its series"
        )
    if not candidates:
        raise ValueError(
            f"{path}: no slice of a volume there, expected one series; skipped: {summarize(content.skipped)}"
        )
    return candidates[0]


def _description(frames: Series) -> str:
    first = frames[0]
    return f"{first.title or 'unnamed'} ({first.modality}, {len(frames)} slices, {first.path.name})"
