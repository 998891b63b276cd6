"""medconv/utils/locks.py: who waits for whom, and pieces of work that one process claims."""

from __future__ import annotations

import logging

import pytest
from filelock import FileLock

from medconv.utils import locks
from medconv.utils.locks import Claims, acquired


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


def test_a_piece_of_work_belongs_to_one_process(tmp_path):
    one = Claims(tmp_path / "claims")
    other = Claims(tmp_path / "claims")
    one.join()
    assert other.is_shared() and not one.is_shared()
    other.join()
    lock = one.lock("case")
    assert acquired(lock) and not acquired(other.lock("case"))
    lock.release()
    assert acquired(other.lock("case")) and one.is_shared()
    assert not one.leave() and other.leave()
    assert not (tmp_path / "claims").exists()


def test_a_process_that_was_killed_is_not_at_work(tmp_path):
    """Its lock's file stays, without the lock."""
    (tmp_path / "machine-1-2.process").touch()
    claims = Claims(tmp_path)
    assert not claims.is_shared() and not list(tmp_path.iterdir())
