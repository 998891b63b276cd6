"""Locks that processes share by a file: who waits for one says so."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)
_MAX_TEXT = 200  # characters of a lock file, which others may have written


@contextmanager
def held(lock: FileLock) -> Iterator[None]:
    """Hold the lock inside; a message says so if another process holds it.

    Where a file system has no locks, such as Lustre without the mount option `flock`, filelock writes process
    and host into the file instead, which stays if that process is killed on another host.
    """
    take(lock)
    try:
        yield
    finally:
        lock.release()


def take(lock: FileLock) -> None:
    """As `held`, until the lock is released.

    Raises: OSError: no permission.
    """
    if not acquired(lock):
        log.info("waiting for %s", _holder(Path(lock.lock_file)))
        lock.acquire()


def acquired(lock: FileLock) -> bool:
    """Take a lock if it is free."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def _holder(path: Path) -> str:
    """Who holds the lock, in words, and what to do if it is a process that was killed."""
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = path.read_text()[:_MAX_TEXT].splitlines()
    if len(lines) < 2:  # the system's own lock, which ends with its process
        return f"another process, which holds {path}"
    return f"process {lines[0]} on {lines[1]}, which holds {path}; remove this file if that process is gone"
