"""Writing so that a reader, and a run after a crash, meets the old file or the new one, and never a part
of one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # the disk is full, or a user's share of it, or files may not grow
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """A path in the same folder to write to; the file takes the place of `path` when the block ends well,
    else it goes.

    A killed process leaves a hidden file behind. Keeps the ending of the name, which some writers go by.
    Args: durable: the content is on disk before the file has its name, so that no power cut leaves a name
    without it.
    Raises: OSError: with the name of the file, where it came without one, as a full disk's, or with that of
    the partial one.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        if durable:
            _flush(partial)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """As `Path.write_text`, atomically. Of names that are no text (files' may be any bytes) the bytes are
    spelled out.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
