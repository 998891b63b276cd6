"""The command `medconv preprocess` on a tiny dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny


def overrides(dataset: Path, cache: Path) -> list[str]:
    return ["data=msd", f"data.root={dataset}", f"data.cache_dir={cache}", "data.num_folds=3"]


def run_preprocess(
    arguments: list[str],
    cwd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int = 0,
) -> tuple[str, str]:
    """The command in this process; returns its standard output and standard error."""
    monkeypatch.chdir(cwd)
    exit_code = tiny.call(monkeypatch, "preprocess", *arguments)
    out, err = capsys.readouterr()
    assert exit_code == code, err
    assert "Traceback" not in err
    return out, err
