"""`medconv find-postprocessing`: its options, and errors that name them."""

from helpers import tiny

from medconv.features.postprocessing import command
from medconv.utils.exit_codes import USER


def test_errors_name_the_options(tmp_path, monkeypatch, capsys):
    runs = tmp_path / "nowhere"
    assert tiny.call(monkeypatch, "find-postprocessing", "--runs", runs) == USER
    assert capsys.readouterr().err.startswith(f"error: --runs {runs}: no folds of a cross-validation found")
    assert tiny.call(monkeypatch, "find-postprocessing", "--runs", runs, "--device", "quantum") == USER
    assert "error: --device quantum: cannot be used here" in capsys.readouterr().err


def test_select_takes_overrides_as_text():
    arguments = "--runs r --select seed=1"
    assert command.parser().parse_args(arguments.split()).select == "seed=1"
