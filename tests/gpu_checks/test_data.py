"""scripts/gpu_checks/data.py in its tiny form. Loaders, augmentation, whole images, prediction."""

from pathlib import Path

import pytest
from helpers import gpu_parts
from helpers.benchmarks_harness import peers_are_forked


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers_are_forked(monkeypatch)
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "data")
    assert parts["loader"]["figures"]["ours"] > 0 and parts["loader"]["figures"]["MONAI"] > 0
