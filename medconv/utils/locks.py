"""Locks that processes share by a file, and pieces of work that they claim by them, also on several machines.

Who waits for a lock says so. The operating system releases it when its process ends, even if it is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
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


class Claims:
    """A folder of locks: one for each process at work, one for each piece of work.

    `join`, `leave` and `is_shared` must be called under a lock that all processes use for that.

    Args:
        folder: on a file system whose locks hold between the machines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        process = f"{socket.gethostname()}-{os.getpid()}-{id(self)}.process"
        self._process_lock = FileLock(folder / process, thread_local=False)

    def join(self) -> None:
        """Register this process. Raises: OSError, NotImplementedError: no locks can be made there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process_lock.acquire()

    def leave(self) -> bool:
        """Returns: whether no other process is left; the folder is then removed."""
        self._process_lock.release()
        Path(self._process_lock.lock_file).unlink(missing_ok=True)
        if self.is_shared():
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def is_shared(self) -> bool:
        """Whether another process is at work; removes the locks of processes that have ended."""
        alive = False
        for path in self.folder.glob("*.process"):
            lock = FileLock(path)
            if path == Path(self._process_lock.lock_file):
                continue
            if acquired(lock):
                lock.release()
                path.unlink(missing_ok=True)
            else:
                alive = True
        return alive

    def lock(self, name: str) -> FileLock:
        """The lock of a piece of work, not acquired yet; another thread may release it."""
        return FileLock(self.folder / f"{name}.lock", thread_local=False)
