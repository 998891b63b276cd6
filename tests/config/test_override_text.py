"""medconv/config/override_text.py: paths and patterns need no quotes on the command line."""

from pathlib import Path

import pytest
from helpers.configs import composed as config_of

from medconv.config import validate


@pytest.mark.parametrize("images", ["a/{id}_training.tif", r"a/\{id\}_training.tif", "'a/{id}_training.tif'"])
def test_patterns_stand_on_the_command_line_as_they_are(images: str) -> None:
    arguments = ["data=folder", f"data.images={images}", "data.labels=*/{id}-T1-*"]
    data = validate(config_of(*arguments, r"data.group_pattern=(patient\d+)_")).data
    assert data.layout["images"] == data.images == "a/{id}_training.tif"
    assert (data.labels, data.group_pattern) == ("*/{id}-T1-*", r"(patient\d+)_")
    assert validate(config_of("data=folder", "data.group_pattern=null")).data.group_pattern is None


def test_a_volume_of_a_series_needs_no_quotes() -> None:
    """Hydra takes no # outside of quotes."""
    assert validate(config_of("data=folder", "data.images=a/{id}/dwi#b=50")).data.images == "a/{id}/dwi#b=50"
    structures = "data.labels=a/{id}/rs.dcm#roi=Heart|Herz;lung L"
    assert validate(config_of("data=folder", structures)).data.labels == structures.partition("=")[2]
    channels = "data.images={b0:a/{id}/dwi#1,t2:a/{id}/t2,b50:b/*/{id}/d#b=50.5}"
    expected = {"b0": "a/{id}/dwi#1", "t2": "a/{id}/t2", "b50": "b/*/{id}/d#b=50.5"}
    assert validate(config_of("data=folder", channels)).data.images == expected


@pytest.mark.parametrize("root", ["a/jürgen/日本", "scans (2)/x=1", "a;b&c/d[1]"])
def test_a_path_of_any_characters_needs_no_quotes(root: str) -> None:
    """Hydra reads ASCII letters alone, and gives brackets a meaning."""
    data = validate(config_of("data=folder", f"data.images={root}/{{id}}.nii", f"data.root={root}")).data
    assert (data.images, data.root) == (f"{root}/{{id}}.nii", root)


def test_a_shell_leaves_the_home_folder_in_a_value() -> None:
    assert config_of("data.root=~/scans").data.root == str(Path.home() / "scans")


def test_a_pattern_for_each_channel() -> None:
    channels = "data.images={t1:a/{id}_t1.nii.gz,flair:a/{id}_f*.nii.gz}"
    data = validate(config_of("data=folder", channels)).data
    assert data.images == {"t1": "a/{id}_t1.nii.gz", "flair": "a/{id}_f*.nii.gz"}
