"""scripts/gpu_checks/distributed.py in its tiny form. One process, and the reasons of what needs more."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "distributed")
    assert all(
        "needs two" in parts[name]["reason"] for name in ("ddp-two", "tensor-parallel", "lost-machine")
    )
