"""scripts/gpu_checks/memory.py in its tiny form. Estimates, autotune and a full device."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "memory")
    assert parts["memory-estimate"]["figures"]["fp32"] == pytest.approx(1, abs=0.3)
