"""Work that several processes share, also on several machines: each piece is claimed under a file lock.

The operating system releases a lock when its process ends, even if it is killed.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from filelock import FileLock

from medconv.utils.locks import acquired


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
        """Of a piece of work, not acquired yet; another thread may release it."""
        return FileLock(self.folder / f"{name}.lock", thread_local=False)
