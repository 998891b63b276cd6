"""medconv/utils/locks.py: a process that waits for another one says for which."""

from __future__ import annotations

import logging

import pytest
from filelock import FileLock

from medconv.utils import locks


class Releasing(logging.Handler):
    """Releases a lock as soon as somebody says that they wait for it."""

    def __init__(self, lock: FileLock) -> None:
        super().__init__()
        self.lock = lock
        self.messages = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.lock.release()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "waiting for another process, which holds {}"),
        (
            "17\nnode3\n",
            "waiting for process 17 on node3, which holds {}; remove this file if that process is gone",
        ),
    ],
)
def test_who_waits_says_for_whom(content, message, tmp_path, monkeypatch):
    path = tmp_path / ".lock"
    other = FileLock(path, thread_local=False)
    other.acquire()
    path.write_text(content)  # as filelock writes it where a file system has no locks
    releasing = Releasing(other)
    monkeypatch.setattr(locks.log, "handlers", [releasing])
    monkeypatch.setattr(locks.log, "level", logging.INFO)
    with locks.held(FileLock(path)):
        assert not locks.acquired(other)
    assert releasing.messages == [message.format(path)]
    with locks.held(FileLock(path)):
        pass
    assert len(releasing.messages) == 1  # nobody else held it
