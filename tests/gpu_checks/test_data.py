"""scripts/gpu_checks/data.py in its tiny form. Loaders, augmentation, whole images, prediction."""

from pathlib import Path

import pytest
from helpers import gpu_parts


def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = gpu_parts.tiny(monkeypatch, tmp_path, "data")
    assert parts["loader"]["figures"]["ours"] > 0 and parts["loader"]["figures"]["MONAI"] > 0
