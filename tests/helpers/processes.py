"""Commands in processes of their own that need not load their libraries anew, for tests that start many."""

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

from medconv.cli import train
from medconv.cli.entrypoint import guard


class Forked:
    """A command as a user starts it, in the background, but without loading its libraries anew; its output
    in `said`.
    """

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
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
        code = guard(partial(train.main, arguments))
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
