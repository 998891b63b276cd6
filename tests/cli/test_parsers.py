"""Parsers of the commands: what their help shows, names of options, and defaults that repeat what torch
would have to load.
"""

import importlib

import pytest
from helpers import tiny

from medconv import config
from medconv.cli import evaluate, export, find_postprocessing, predict
from medconv.cli.main import COMMANDS
from medconv.export import export as exporting_command
from medconv.export.formats import FORMATS, OPSETS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_first_and_fits_a_screen(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert tiny.call(monkeypatch, name, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "example:" and lines[1].startswith(f"  medconv {name} ")
    assert max(map(len, lines)) <= 110 and len(lines) < 60 and "general:" in lines


@pytest.mark.parametrize("name", ["train", "preprocess"])
def test_help_names_every_group_of_the_config(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.call(monkeypatch, name, "--help")
    said = capsys.readouterr().out
    for file in config.conf_dir().glob("*/*.yaml"):
        assert f"  {file.parent.name} " in said and file.stem in said


@pytest.mark.parametrize("name", ["predict", "evaluate", "export", "find_postprocessing"])
def test_examples_parse(name: str) -> None:
    parser = importlib.import_module(f"medconv.cli.{name}").parser()
    assert parser.example.startswith(f"{parser.prog} --")
    parser.parse_args(parser.example.removeprefix(f"{parser.prog} ").split())


def test_defaults_of_export_are_those_of_the_work() -> None:
    assert set(export.FORMATS) == set(FORMATS)
    assert (OPSETS[0], exporting_command.TOLERANCE) == (export.OPSET, export.TOLERANCE)


def test_options_have_the_names_of_the_field() -> None:
    words = ["--checkpoint", "a", "--trust-package", "x", "--trust-package", "y"]
    given = predict.parser().parse_args(
        [
            *words,
            "--input",
            "i",
            "--output",
            "o",
            "--save-probabilities",
            "--sw-batch-size",
            "3",
            "--exported-model",
            "m",
        ]
    )
    assert given.trust_package == ["x", "y"] and given.save_probabilities and given.sw_batch_size == 3
    assert [path.name for path in given.exported_model] == ["m"]
    assert (
        evaluate.parser().parse_args(["--predictions", "p", "--output", "o", "--split", "val"]).split == "val"
    )
    assert find_postprocessing.parser().parse_args(["--runs", "r", "--select", "seed=1"]).select == "seed=1"
    assert export.parser().parse_args([*words, "--format", "onnx", "--output", "o"]).trust_package == [
        "x",
        "y",
    ]
