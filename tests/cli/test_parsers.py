"""Parsers of the commands: help and examples."""

import pytest
from helpers import tiny

from medconv import doors
from medconv.cli.main import commands


@pytest.mark.parametrize("name", commands())
def test_help_shows_an_example_first_and_fits_a_screen(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "90")
    assert tiny.call(monkeypatch, name, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "example:" and lines[1].startswith(f"  medconv {name} ")
    assert max(map(len, lines)) <= 90 and len(lines) < 60 and "general:" in lines


@pytest.mark.parametrize("name", ["predict", "evaluate", "export", "find-postprocessing"])
def test_examples_parse(name):
    parser = doors.load(commands()[name][1]).parser()
    assert parser.example.startswith(f"{parser.prog} --")
    parser.parse_args(parser.example.removeprefix(f"{parser.prog} ").split())
