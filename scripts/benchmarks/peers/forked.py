"""A peer in a fork of this process, which has loaded the libraries: for tests and tiny forms, where loading
them is most of the time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any


class ForkedPeer:
    """In the place of `subprocess.Popen` in `benchmarks.peers.process`, for `python -m benchmarks...`."""

    def __init__(
        self,
        command: list[str],
        *,
        stderr: IO[str],
        env: dict[str, str],
        start_new_session: bool = False,
        **pipes: Any,
    ) -> None:
        assert (command[0], command[1]) == (sys.executable, "-m"), command
        assert pipes == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}, pipes
        (into, requests), (answers, out) = os.pipe(), os.pipe()
        ends = (into, out, stderr.fileno())
        arguments = (command[2:], ends, (requests, answers), env, start_new_session)
        self._process = multiprocessing.get_context("fork").Process(target=_peer, args=arguments)
        self._process.start()
        os.close(into)
        os.close(out)
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(requests, "w"), os.fdopen(answers)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired: it has not ended after so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("peer", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _peer(
    words: list[str], ends: Sequence[int], others: Sequence[int], env: dict[str, str], new_session: bool
) -> None:
    if new_session:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, end in enumerate(ends):
        os.dup2(end, number)
    for end in (*ends, *others):
        os.close(end)
    sys.stdin, sys.stdout, sys.stderr = (open(n, m, closefd=False) for n, m in enumerate("rww"))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    logging.captureWarnings(False)  # a new process has not begun to log: its output is answers alone
    logging.getLogger().handlers.clear()
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
