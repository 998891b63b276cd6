"""The benchmark command, run in this process, its peers in forks of it, and a clock that a test turns on by hand."""

import json
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from helpers import tiny

from benchmark import main
from benchmarks.peers import process

# of the rows of every benchmark
ROW_KEYS = {"benchmark", "case", "variant", "reference", "ratio", "device", "hardware", "cores", "torch"}


def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> list[dict]:
    """The rows of `python scripts/benchmark.py` with these arguments."""
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments, "--json", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    return json.loads(file.read_text())


def commands_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a benchmark starts as `python -m medconv.cli ...` run here, without another import of
    torch.
    """

    real = subprocess.run

    def run(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        if list(command[1:3]) != ["-m", "medconv.cli"]:
            return real(command, **settings)
        argv = sys.argv[:]
        try:
            return subprocess.CompletedProcess(command, tiny.call(monkeypatch, *command[3:]), "", "")
        finally:
            sys.argv[:] = argv

    monkeypatch.setattr(subprocess, "run", run)


class ManualClock:
    """Tells the seconds that `wait` was called for, and no others."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


class ForkedPeer:
    """In the place of `subprocess.Popen` for a peer: `python -m benchmarks...` in a fork of this process,
    which has loaded the libraries.
    """

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
        os.close(into), os.close(out)
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


def peers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of this Python start without another import of torch."""
    names = SimpleNamespace(Popen=ForkedPeer, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(process, "subprocess", names)
