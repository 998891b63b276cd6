"""The parts of scripts/gpu_check.py in their tiny form, forked from the process of the tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_checks import claims, command


def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str) -> dict[str, Any]:
    """All parts of a group on the CPU; every one ran, or says why it cannot. Returns: by name, its result."""
    file = tmp_path / "results.json"
    code = run(monkeypatch, "--part", group, "--json", str(file))
    parts: dict[str, Any] = json.loads(file.read_text())["parts"]
    assert list(parts) == [claim.name for claim in claims.of_group(group)]
    bad = {name: result for name, result in parts.items() if result["verdict"] not in ("ran", "skipped")}
    assert code == 0 and not bad, json.dumps(bad, indent=1).replace("\\n", "\n")
    return parts


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The command's exit code."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return command.main(["--device", "cpu", "--tiny", *words])
