"""scripts/gpu_checks/correctness.py in its tiny form. The comparisons hold where both sides are the CPU."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "correctness")
    assert parts["same-as-cpu"]["figures"]["largest difference"] == 0
    assert parts["muon"]["figures"] == {"error": 0, "change of a skipped step": 0}
    assert set(parts["no-waits"]["figures"]) > {"where", "forward", "optimizer"}
