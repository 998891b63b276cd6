"""`medconv import-nnunet`: its options, and that they reach the import."""

from pathlib import Path

from helpers import tiny

from medconv.features.nnunet import command
from medconv.utils.exit_codes import USER


def test_folds_and_checkpoint_have_defaults():
    options = command.parser().parse_args(["model", "--output", "runs/m"])
    assert (options.folder, options.output) == (Path("model"), Path("runs/m"))
    assert options.folds is None and options.checkpoint == "checkpoint_final.pth"
    assert command.parser().parse_args(["m", "--output", "o", "--folds", "0", "all"]).folds == ["0", "all"]


def test_folder_and_checkpoint_reach_the_import(tmp_path, monkeypatch, capsys):
    words = ("import-nnunet", tmp_path / "model", "--output", tmp_path / "out", "--checkpoint", "mine.pth")
    assert tiny.call(monkeypatch, *words) == USER
    error = capsys.readouterr().err
    assert str(tmp_path / "model") in error and "mine.pth" in error
    assert not (tmp_path / "out").exists()
