"""medconv/utils/progress.py: a real terminal shows a bar that vanishes, and messages stay whole; a pipe shows no bar."""

import os
import pty
import subprocess
import sys

from helpers.waiting import PATIENCE_S

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
