"""medconv/utils/progress.py: bars, and threads that share work."""

import os
import pty
import subprocess
import sys
import threading

import pytest
from helpers.waiting import PATIENCE_S

from medconv.utils.progress import each

PROGRAM = """
import logging
from medconv.utils.logging import log, start_logging
from medconv.utils.progress import counting, in_terminal, track
start_logging()
for item in track(iter("abc"), "reading [all]", 3):
    log.info("item %s", item)
with counting("predicting", 2) as bar:
    bar.update(bar.task_ids[0], completed=2)
print(in_terminal())
"""


def terminal(tmp_path, *, output_too, term="xterm"):
    """What the program writes to standard output, where that is a file, and to a terminal."""
    ours, theirs = pty.openpty()
    with (tmp_path / "out").open("w") as file:
        out = theirs if output_too else file
        settings = {"stdout": out, "stderr": theirs, "env": {**os.environ, "TERM": term, "COLUMNS": "80"}}
        subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=PATIENCE_S, **settings)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # all of it is read
        pass
    os.close(ours)
    return (tmp_path / "out").read_text(), shown.decode()


def test_in_a_terminal_messages_are_lines_above_the_bar(tmp_path):
    _, shown = terminal(tmp_path, output_too=True)
    assert "reading [all]" in shown and "3/3" in shown and "predicting" in shown and "2/2" in shown
    for item in "abc":  # the bar's line is erased before each message
        assert f"\x1b[2Kitem {item}\r\n" in shown
    assert shown.rstrip().endswith("True")
    assert "\x1b[?25h" in shown[: shown.index("item a")]  # a killed process leaves the cursor visible


def test_output_in_a_file_stays_there(tmp_path):
    output, shown = terminal(tmp_path, output_too=False)
    assert output == "item a\nitem b\nitem c\nTrue\n"
    assert "item" not in shown and "3/3" in shown


def test_without_a_cursor_there_is_no_bar(tmp_path):
    output, shown = terminal(tmp_path, output_too=False, term="dumb")
    assert (output, shown) == ("item a\nitem b\nitem c\nFalse\n", "")


def test_a_pipe_gets_no_bar(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on build servers
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.stdout, ended.stderr) == ("item a\nitem b\nitem c\nFalse\n", "")


def test_each_runs_as_many_threads_as_there_are_workers():
    """Each thread holds one case, so this also limits the memory."""
    running, most, lock, all_run = 0, 0, threading.Lock(), threading.Barrier(3)

    def work(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        all_run.wait(PATIENCE_S)
        with lock:
            running -= 1
        return -item

    assert list(each(work, range(21), 3, "work")) == [-n for n in range(21)]
    assert most == 3


def test_the_first_error_ends_the_work():
    """To do all items would take 100 seconds; the error is seen long before."""
    done, items = [], range(20_000)

    def work(item):
        if item == 1:
            raise ValueError("of item 1")
        threading.Event().wait(0.01)
        done.append(item)

    with pytest.raises(ValueError, match="of item 1"):
        list(each(work, items, 2, "work"))
    assert len(done) < len(items) - 1
