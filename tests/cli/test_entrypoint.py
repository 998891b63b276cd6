"""Exit codes, and one line for errors that a user can correct."""

import errno
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import ConfigKeyError

from medconv.cli import entrypoint
from medconv.cli.entrypoint import guard
from medconv.utils.cluster import PeerLostError
from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER
from medconv.utils.signals import RunInterrupted


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("data.root: no such folder"), USER, "error: data.root: no such folder\n"),
        (HydraException("no such option"), USER, "error: no such option\n"),
        (ConfigKeyError("no such key"), USER, "error: no such key\n"),
        (MisconfigurationException("devices"), USER, "error: devices\n"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
        (RunInterrupted(), PREEMPTED, "stopped by SIGTERM; run the same command again to resume\n"),
        (
            RunInterrupted(signal.SIGUSR1),
            PREEMPTED,
            "stopped by SIGUSR1; run the same command again to resume\n",
        ),
        (
            RunInterrupted(signal.SIGINT),
            INTERRUPTED,
            "stopped by SIGINT; run the same command again to resume\n",
        ),
        (PeerLostError("another process is gone"), PREEMPTED, "error: another process is gone\n"),
        (SystemExit(2), USER, ""),
        (SystemExit(0), DONE, ""),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x"),
            USER,
            "error: x: cannot be written (No space left on device)\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert guard(command) == code
    assert capsys.readouterr().err == message


def test_error_classes_that_are_named_as_text_exist() -> None:
    for module, name in (*entrypoint.USER_ERRORS, entrypoint.PEER_LOST):
        assert issubclass(getattr(importlib.import_module(module), name), BaseException)


def test_a_bug_shows_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise AssertionError("ours")

    assert guard(broken) == BUG
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_without_access_is_one_error(capsys: pytest.CaptureFixture[str], number: int) -> None:
    def refused() -> int:
        raise OSError(number, os.strerror(number), "runs/x")

    assert guard(refused) == USER
    assert capsys.readouterr().err == f"error: runs/x: no access ({os.strerror(number)})\n"

    def blocked() -> int:
        Path("/sys/medconv").mkdir()  # which nobody may create
        return DONE

    assert guard(blocked) == USER
    assert capsys.readouterr().err.startswith("error: /sys/medconv: no access (")


@pytest.mark.parametrize(
    ("lines", "code"), [(1, DONE), (100_000, USER)], ids=["in the buffer", "more than the buffer holds"]
)
def test_a_closed_pipe_is_not_a_bug(lines: int, code: int) -> None:
    """As in `medconv --help | head -1`."""
    script = f"import sys; from medconv.cli.entrypoint import guard; sys.exit(guard(lambda: print('x\\n' * {lines}) or 0))"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_another_broken_pipe_is_a_bug(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    assert guard(broken) == BUG
    assert "Traceback" in capfd.readouterr().err
