"""medconv/config/options.py: names of a group's options."""

import pytest

from medconv import config
from medconv.config.options import groups, list_options


def test_options_are_the_files_of_a_group() -> None:
    files = {file.stem for file in (config.conf_dir() / "model").glob("*.yaml")}
    assert list_options("model") == sorted(files - {"base"})
    assert "base" not in list_options("data")
    assert "model" in groups() and "hydra" not in groups()


def test_a_pattern_selects_names() -> None:
    names = list_options("model", "*resnet*")
    assert "segresnet" in names and "customconv" not in names
    assert list_options("model", "none of them") == []


def test_an_unknown_group_names_all_groups() -> None:
    with pytest.raises(config.ConfigError, match="there is no config group 'models'; .* model, "):
        list_options("models")
