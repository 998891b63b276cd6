"""The benchmark command, run in this process, and a clock that a test turns on by hand."""

import json
import sys
from pathlib import Path

import pytest

from benchmark import main


def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> list[dict]:
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments, "--json", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    return json.loads(file.read_text())


class ManualClock:
    """Tells the seconds that `wait` was called for, and no others."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
