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


def of_medconv(body, **names):
    """A function as if it were defined in a file of medconv."""
    file = Path(entrypoint.__file__).with_name("broken.py")
    exec(compile(f"def broken():\n    {body}", file, "exec"), names)
    return names["broken"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("data.root: no such folder"), USER, "error: data.root: no such folder\n"),
        (HydraException("no such option"), USER, "error: no such option\n"),
        (ConfigKeyError("no such key"), USER, "error: no such key\n"),
        (MisconfigurationException("devices"), USER, "error: devices\n"),
        (
            ModuleNotFoundError("no module", name="medconv.features.gone.command"),
            USER,
            "error: this needs medconv.features.gone, which this installation lacks\n",
        ),
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
        (SystemExit("no such site"), USER, "error: no such site\n"),
        (SystemExit(0), DONE, ""),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x"),
            USER,
            "error: x: cannot be written (No space left on device)\n",
        ),
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS), b"events"),
            USER,
            f"error: events: no access ({os.strerror(errno.EROFS)})\n",
        ),
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x"),
            USER,
            f"error: x: {os.strerror(errno.EMFILE)}; `ulimit -n 65536` permits more\n",
        ),
        (
            OSError(errno.ESTALE, os.strerror(errno.ESTALE), "x"),
            USER,
            f"error: x: its disk or network file system failed ({os.strerror(errno.ESTALE)})\n",
        ),
        (
            OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "x"),
            USER,
            f"error: x: {os.strerror(errno.ENAMETOOLONG)}\n",
        ),
        (
            FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "runs/x/last.ckpt"),
            USER,
            f"error: runs/x/last.ckpt: {os.strerror(errno.ENOENT)}\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_error_has_its_exit_code(error, code, message, capsys):
    assert guard(of_medconv("raise error", error=error)) == code
    assert capsys.readouterr().err == message


def test_error_classes_that_are_named_as_text_exist():
    for module, name in (*entrypoint.USER_ERRORS, entrypoint.PEER_LOST):
        assert issubclass(getattr(importlib.import_module(module), name), BaseException)


def test_a_bug_shows_a_traceback(capsys):
    assert guard(of_medconv("raise AssertionError('ours')")) == BUG
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.endswith("please report it with the lines above\n")


def test_a_file_that_medconv_itself_lacks_is_a_bug(capsys):
    own = Path(entrypoint.__file__).with_name("absent.html")
    assert guard(of_medconv("open(own)", own=own)) == BUG
    assert "Traceback" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_is_named(tmp_path, capsys):
    """The system says that it exists, or of a file below it, that it does not."""
    link = tmp_path / "runs"
    link.symlink_to("nowhere")
    assert guard(of_medconv("link.mkdir(exist_ok=True)", link=link)) == USER
    assert capsys.readouterr().err == f"error: {link}: a link to nowhere, which does not exist\n"
    below = link / "x"
    assert guard(of_medconv("below.mkdir()", below=below)) == USER
    assert capsys.readouterr().err == f"error: {below}: {link} is a link to nowhere, which does not exist\n"


def test_an_error_in_own_code_is_the_users(capsys):
    """Of the code itself, or of a library that it called; not what medconv does below it."""

    def own():
        return importlib.import_module("nowhere").number

    line = f"error: {__file__}, line {own.__code__.co_firstlineno + 1}: "
    assert guard(of_medconv("callback()", callback=own)) == USER
    shown = capsys.readouterr().err
    assert "Traceback" in shown and f"{line}ModuleNotFoundError: No module named 'nowhere'\n" in shown
    assert guard(lambda: of_medconv("raise KeyError('ours')")()) == BUG
    capsys.readouterr()

    def wrong():
        return int("a word")

    assert guard(of_medconv("callback()", callback=wrong)) == USER
    assert f"line {wrong.__code__.co_firstlineno + 1}: invalid literal for int()" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_without_access_is_one_error(capsys, number):
    def refused():
        raise OSError(number, os.strerror(number), "runs/x")

    assert guard(refused) == USER
    assert capsys.readouterr().err == f"error: runs/x: no access ({os.strerror(number)})\n"

    def blocked():
        Path("/sys/medconv").mkdir()  # which nobody may create
        return DONE

    assert guard(blocked) == USER
    assert capsys.readouterr().err.startswith("error: /sys/medconv: no access (")


@pytest.mark.parametrize(
    ("lines", "code"), [(1, DONE), (100_000, USER)], ids=["in the buffer", "more than the buffer holds"]
)
def test_a_closed_pipe_is_not_a_bug(lines, code):
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


def test_another_broken_pipe_is_a_bug(capfd):
    assert guard(of_medconv("raise BrokenPipeError(32, 'Broken pipe')")) == BUG
    assert "Traceback" in capfd.readouterr().err
