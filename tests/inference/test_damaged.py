"""medconv/inference/load.py: errors of damaged metadata name the checkpoint and its version."""

from pathlib import Path

import pytest

from medconv.inference.load import explaining_damage


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"version": "0.0.1"},
            r"^a.ckpt: damaged, or written by another version \(written by medconv 0.0.1, this is",
        ),
        (
            {"version": 3},
            r"^a.ckpt: damaged, or written by another version: its metadata cannot be read \(KeyError: ",
        ),
        ([], r"^a.ckpt: damaged, or written by another version: its"),
    ],
)
def test_an_error_names_the_checkpoint_and_its_version(metadata, message):
    with pytest.raises(ValueError, match=message), explaining_damage(Path("a.ckpt"), metadata):
        raise KeyError("targets")


def test_messages_for_users_stay():
    with pytest.raises(ValueError, match="^mine$"), explaining_damage(Path("a.ckpt"), {}):
        raise ValueError("mine")
