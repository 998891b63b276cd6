"""scripts/gpu_checks/speed.py in its tiny form. The benchmarks' rows have what the parts read."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "speed")
    assert parts["step-small"]["figures"]["perf=fast, seconds"] > 0
    assert 0 < parts["images-per-second"]["figures"]["share of the bf16 peak"] < 0.1
