"""medconv/training/run_dir.py: one process at a time, also while another one moves the folder."""

import fcntl
import os

import pytest

from medconv.config import ConfigError
from medconv.training.run_dir import RunDir


def is_refused(folder):
    """Whether another process cannot take the lock."""
    pid = os.fork()
    if pid == 0:
        try:
            RunDir(folder).claim()
        except ConfigError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_one_process_holds_the_lock_until_it_closes_it(tmp_path):
    (tmp_path / ".lock").write_text("of a process that was killed on another machine")
    run = RunDir(tmp_path)
    run.claim()
    run.claim()
    assert is_refused(tmp_path)
    run.close()
    assert not is_refused(tmp_path)


@pytest.mark.parametrize("makes_new", [False, True])
def test_a_folder_that_is_moved_meanwhile_is_not_locked(makes_new, tmp_path, monkeypatch):
    """By another process that starts with `run.resume=never`, between opening and locking the file."""
    folder = tmp_path / "run"
    folder.mkdir()
    take = fcntl.lockf

    def after_the_move(*arguments):
        folder.rename(tmp_path / "moved")
        if makes_new:
            folder.mkdir()
            (folder / ".lock").touch()
        take(*arguments)

    monkeypatch.setattr(fcntl, "lockf", after_the_move)
    with pytest.raises(ConfigError, match="run: another process is training there"):
        RunDir(folder).claim()


def test_a_folder_that_is_gone_is_not_locked(tmp_path):
    with pytest.raises(ConfigError, match="another process is training there"):
        RunDir(tmp_path / "run").claim()
