"""Atomic file writes: a reader, or a run after a crash, sees the old or the new file, never a partial one."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The disk is full, a quota is exceeded, or the file is larger than allowed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
# A disk is broken, or a network file system has lost its server or was mounted again.
DISK_FAILED = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
GONE = (errno.ENOENT, errno.ENOTDIR)  # the folder of a file that is to be written was deleted
# The file itself may be whole.
UNREADABLE = (*NO_ACCESS, *DISK_FAILED, *TOO_MANY_FILES, errno.ENOMEM)
DISK_ERRORS = (*NO_ROOM, *NO_ACCESS, *DISK_FAILED, *TOO_MANY_FILES, *GONE)


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """A temporary path in the same folder; replaces `path` if the block succeeds, else it is deleted.

    The temporary name keeps the suffix, from which some writers choose a format. A killed process leaves
    a hidden file behind.

    Args:
        durable: flush the content to disk before the rename, so that it survives a power cut.

    Raises:
        OSError: always names `path`, also where the error has no file name or that of the partial file.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        if durable:
            with partial.open("rb+") as file:  # Windows flushes only what it may write
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # Without a number the error is only a text, to which a file name adds nothing.
        has_number = getattr(error, "errno", None) is not None
        if isinstance(error, OSError) and has_number and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


def flush_folder(folder: Path) -> None:
    """Write the names of its files to disk: a power cut may otherwise undo a rename, by half a minute."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text atomically. Bytes that are not text, as in some file names, are escaped."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
