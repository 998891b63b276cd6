"""scripts/gpu_checks/layers.py in its tiny form. The benchmarks' rows have what the parts read."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "layers")
    assert {"basis, times nn.Conv", "acs, times nn.Conv"} <= set(parts["convolutions-price"]["figures"])
