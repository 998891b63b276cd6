"""Draws the terminal of a run as SVG: its lines, and the last progress bar of training.

`python docs/terminal_picture.py OUTPUT.svg COMMAND ...`, on Linux. `docs/images/terminal.svg` is that of
`medconv train data=msd data.root=/data/Task04_Hippocampus trainer.max_time=00:00:06:00 run.name=first`, of
the same run as `result.png` and `report.png`.
"""

import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import termios
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 100
CURSOR = re.compile(r"\r+(?=\n)|\x1b\[\?25[lh]")
REDRAWN = re.compile(r"\r\x1b\[2K|\n")  # before each state of a bar
REMOVED = re.compile(r"([^\n]*)\n\r?\x1b\[1A\x1b\[2K")  # a bar with all its states
# the reader's own monospace font: the original fetches one from another site
FORMAT = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main(output: str, *command: str) -> None:
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text.assemble(("$ ", "bold green"), shlex.join(command)))
    console.print(Text.from_ansi(settled(output_of(*command))))
    title = shlex.join(command[:2])
    Path(output).write_text(console.export_svg(title=title, theme=MONOKAI, code_format=FORMAT))


def output_of(*command: str) -> str:
    """What a command writes to a terminal."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"})
    parts = []
    try:
        while part := os.read(terminal, 65_536):
            parts.append(part)
    except OSError:  # Linux says by an error that the command has ended
        pass
    return b"".join(parts).decode()


def settled(output: str) -> str:
    """Without bars, as a terminal shows it at the end, but for that of training, which says its speed."""
    output = CURSOR.sub("", output)
    states = [state for state in REDRAWN.split(output) if "left" in state and "samples/s" in state]
    kept = f"{states[-1]}\n" if states else ""
    return REMOVED.sub(lambda bar: kept if "samples/s" in bar[1] else "", output).strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
