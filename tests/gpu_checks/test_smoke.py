"""scripts/gpu_checks/smoke.py in its tiny form. Training, resuming, prediction and export by the command."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "smoke")
    assert parts["resume"]["figures"]["largest difference of a loss"] == 0
    assert parts["predict"]["figures"] == {"voxels that differ": 0, "cases": 1}
