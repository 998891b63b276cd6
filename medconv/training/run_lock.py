"""A lock by which only one process at a time trains into a folder."""

import errno
import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from medconv.config import ConfigError

log = logging.getLogger(__name__)


class RunLock:
    """Lock on the file `.lock` of a run's folder.

    The system releases it when the process ends, on whatever machine; loader workers do not inherit it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None

    def claim(self) -> None:
        """Take the lock, anew if this process has it.

        Raises: ConfigError: another process holds it, or has just moved the folder aside.
        """
        self.close()
        path = self._folder / ".lock"
        is_ours = False
        with suppress(FileNotFoundError):
            self._file = path.open("ab")
            is_ours = self._locked(self._file) and os.path.samestat(
                os.fstat(self._file.fileno()), path.stat()
            )
        if not is_ours:
            raise ConfigError(
                f"{self._folder}: another process is training there; wait until it ends, or choose another "
                "run.name"
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _locked(self, file: IO[bytes]) -> bool:
        """Whether no other process holds the lock; some file systems have no locks."""
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            log.debug("%s: cannot be locked against other processes (%s)", self._folder, error)
        return True
