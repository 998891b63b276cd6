"""medconv/cli/import_nnunet_command.py: its options reach the import."""

from pathlib import Path

import pytest
from helpers import tiny

from medconv.utils.exit_codes import USER


def test_folder_and_checkpoint_reach_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("import-nnunet", tmp_path / "model", "--output", tmp_path / "out", "--checkpoint", "mine.pth")
    assert tiny.call(monkeypatch, *words) == USER
    error = capsys.readouterr().err
    assert str(tmp_path / "model") in error and "mine.pth" in error
    assert not (tmp_path / "out").exists()
