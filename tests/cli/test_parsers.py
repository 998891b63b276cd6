"""Parsers of the commands: help and examples."""

import importlib

import pytest
from helpers import tiny

from medconv import doors
from medconv.cli.main import COMMANDS


@pytest.mark.parametrize("name", [*COMMANDS, *doors.mapping(doors.COMMANDS)])
def test_help_shows_an_example_first_and_fits_a_screen(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert tiny.call(monkeypatch, name, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "example:" and lines[1].startswith(f"  medconv {name} ")
    assert max(map(len, lines)) <= 90 and len(lines) < 60 and "general:" in lines


@pytest.mark.parametrize("name", ["predict", "evaluate", "find-postprocessing", "export"])
def test_examples_parse(name: str) -> None:
    features = doors.mapping(doors.COMMANDS)
    module = features[name][1] if name in features else f"medconv.cli.{name.replace('-', '_')}"
    parser = importlib.import_module(module).parser()
    assert parser.example.startswith(f"{parser.prog} --")
    parser.parse_args(parser.example.removeprefix(f"{parser.prog} ").split())
