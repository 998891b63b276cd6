"""Training cases are compared with their checksums while a run trains.

A patch is read without the rest of its case, so damage on the disk that keeps size and time would be trained
on in silence. Reading every case at each start would cost minutes for a large store.
"""

import threading
from collections.abc import Sequence

from medconv.data.preprocessing.store import Store

_SHARE = 0.02  # of a core's time, and of the disk's
_WAITS_PER_READ = (1 - _SHARE) / _SHARE


class _Stopped(Exception):
    """Nobody waits for the check any more."""


class StoreCheck:
    """Reads all training cases once, in a thread that is idle most of the time.

    Args:
        cases: their ids.
    """

    def __init__(self, store: Store, cases: Sequence[str]) -> None:
        self._store = store
        self._cases = cases
        self._damaged = ""  # the id of a damaged case
        self._error: ValueError | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def go_on(self, step: int) -> None:
        """Begin at the first call.

        Args:
            step: of the run; it decides the first case, so that a run that is stopped often gets to all.
        Raises:
            ValueError: a case is damaged; names it.
        """
        if self._thread is None:
            first = step % len(self._cases)
            cases = [*self._cases[first:], *self._cases[:first]]
            self._thread = threading.Thread(target=self._verify, args=(cases,), daemon=True)
            self._thread.start()
        if self._error is not None:
            self._store.discard(self._damaged)  # not before: loader workers would miss its record
            raise ValueError(f"{self._error}; since its start, this run may have trained on the damage")

    def stop(self) -> None:
        """End the check after the block that is being read; does not wait for a disk that never answers."""
        self._stopped.set()

    def _verify(self, cases: Sequence[str]) -> None:
        for case in cases:
            try:
                self._store.verify(case, self._pause)
            except _Stopped:
                return
            except ValueError as error:
                self._damaged = case
                self._error = error
                return

    def _pause(self, read_seconds: float) -> None:
        """Raises: _Stopped."""
        self._stopped.wait(read_seconds * _WAITS_PER_READ)
        if self._stopped.is_set():
            raise _Stopped
