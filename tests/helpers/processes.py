"""Commands in forked processes, which need not load the libraries again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from helpers import tiny

from medconv.cli.entrypoint import guard
from medconv.cli.main import run


class Forked:
    """A command in the background, in a fork of this process that need not load the libraries again.

    Its output is in `said`. Args: command: a subcommand of `medconv`.
    """

    def __init__(self, *arguments: str, cwd: Path, command: str = "train", **environment: str) -> None:
        self.said = cwd / f"said{time.monotonic_ns()}"
        self.said.touch()
        self.pid, self.code = os.fork(), None
        if self.pid:
            return
        output = os.open(self.said, os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        os.environ.update(environment, PYTHONPATH=tiny.PYTHONPATH)
        sys.argv = [str(tiny.ROOT / "train.py"), *arguments]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = guard(partial(run, [command, *arguments]))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait(self) -> tuple[int, str]:
        """Exit code, and what it said."""
        until(self.ended)
        return int(self.code or 0), self.said.read_text()


def until(found: Callable[[], Any], seconds: float = 400) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert value
    return value
