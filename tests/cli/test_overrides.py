"""The groups of options in `conf/`, listed in the help of `train` and `preprocess`."""

import re

import pytest
from helpers import tiny

from medconv import config


@pytest.mark.parametrize("command", ["train", "preprocess"])
def test_help_names_every_group_and_option_of_the_config(command, monkeypatch, capsys):
    tiny.call(monkeypatch, command, "--help")
    output = capsys.readouterr().out
    for file in config.conf_dir().glob("*/*.yaml"):
        assert f"  {file.parent.name} " in output
        assert bool(re.search(rf"\b{file.stem}\b", output)) == (file.stem != "base")
