"""Which files are DICOM."""

import os
import struct
from contextlib import suppress
from pathlib import Path

from medconv.data.io.formats import choice_of

# What exports put next to images
_OTHER_SUFFIXES = (".txt", ".json", ".xml", ".csv", ".html", ".md", ".pdf", ".png", ".jpg")
_OTHER_NAMES = {"DICOMDIR", "LICENSE", "README", "VERSION", "THUMBS.DB"}
_PREAMBLE_BYTES = 128
# Limits of the first element of a file without preamble
_MAX_FIRST_LENGTH = 128  # bytes
_MAX_FIRST_ELEMENT = 0x18


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM, or a folder contains a DICOM file; subfolders are not searched.

    Args:
        path: as `choice_of` takes it.
    """
    path, _ = choice_of(path)
    files: list[Path] = []
    with suppress(OSError, ValueError):  # ValueError: an impossible name
        files = [path / name for name, *_ in list_files(path)] if path.is_dir() else [path]
    for file in files:
        with suppress(OSError, ValueError):
            if has_dicom_start(file):
                return True
    return False


def list_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size in bytes and modification time in ns of possible DICOM files in a folder, sorted by name.

    Skips hidden files and what exports put next to images: DICOMDIR, notes, tables, previews.
    """
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _is_other_file(entry.name) and entry.is_file():
                status = entry.stat()
                files.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(files))


def has_dicom_start(path: Path) -> bool:
    """Whether the file starts with 128 bytes and DICM, or, without them, with elements of group 2 or 8."""
    with path.open("rb") as file:
        start = file.read(_PREAMBLE_BYTES + 4)
    if start[_PREAMBLE_BYTES:] == b"DICM":
        return True
    # Group, element and length in implicit encoding; explicit has two letters for the type in place of length
    group, element, length = struct.unpack("<HHI", start[:8].ljust(8, b"\0"))
    is_implicit = 0 < length < _MAX_FIRST_LENGTH and length % 2 == 0
    is_explicit = start[4:6] in (b"UL", b"UI", b"CS", b"OB")
    is_first_element = group in (2, 8) and element <= _MAX_FIRST_ELEMENT
    return len(start) == _PREAMBLE_BYTES + 4 and is_first_element and (is_implicit or is_explicit)


def _is_other_file(name: str) -> bool:
    """Whether a name is that of a hidden file, or of one that exports put next to images."""
    if name.startswith(".") or name.upper() in _OTHER_NAMES:
        return True
    return name.lower().endswith(_OTHER_SUFFIXES)
