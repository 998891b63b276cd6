"""The benchmark command, run in this process, its peers in forks of it, and a clock that a test turns on by hand."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import ranks, tiny

from benchmark import main
from benchmarks.peers import process
from benchmarks.peers.forked import ForkedPeer

# of the rows of every benchmark
ROW_KEYS = {"benchmark", "case", "variant", "reference", "ratio", "device", "hardware", "cores", "torch"}


def learning_arguments(dataset: Path, runs: Path, variants: Sequence[str], seeds: int) -> list[str]:
    """Of the benchmark `learning`, for trainings of two steps on three cases."""
    sizes = ["--cases", "3", "--seeds", str(seeds), "--steps", "2", "--channels", "8", "16", "16"]
    return ["learning", "--root", str(dataset), "--output", str(runs), "--variants", *variants, *sizes]


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


def processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this Python that a benchmark starts begin without another import of torch."""
    real = subprocess.run

    def run(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != sys.executable or command[1] == "-c":
            return real(command, **settings)
        done = ranks.python(*command[1:], cwd=settings.get("cwd", Path.cwd()), **settings["env"])
        assert done.returncode == 0, done.stderr
        return done

    monkeypatch.setattr(subprocess, "run", run)


class ManualClock:
    """Tells the seconds that `wait` was called for, and no others."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


def peers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of this Python start without another import of torch."""
    monkeypatch.setattr(process, "Popen", ForkedPeer)
