"""medconv/training/run_dir.py: which checkpoint a run continues, and the config that it needs."""

import os
from pathlib import Path

import pytest
import torch

from medconv.config import ConfigError
from medconv.training.run_dir import ResumeSource, find_source, read_config


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"medconv": {}, "state_dict": {}, "curves": {"metrics.csv": rows}}, path)
    return path


def test_the_last_checkpoint_is_continued_and_a_damaged_one_is_not(tmp_path):
    assert find_source(tmp_path, "auto") == ResumeSource(None, {})
    last, previous = write(tmp_path / "last.ckpt", 9), write(tmp_path / "previous.ckpt", 5)
    assert find_source(tmp_path, "auto") == ResumeSource(last, {"metrics.csv": 9})
    assert find_source(tmp_path, "never") == ResumeSource(None, {})
    last.write_bytes(last.read_bytes()[:100])
    assert find_source(tmp_path, "auto") == ResumeSource(previous, {"metrics.csv": 5})
    previous.unlink()
    with pytest.raises(ConfigError, match=r"there is no earlier checkpoint, run\.resume=never"):
        find_source(tmp_path, "auto")


def test_if_all_checkpoints_are_damaged_the_error_says_what_to_do(tmp_path):
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"previous\.ckpt.*run\.resume=never.*run\.resume=\S+best\.ckpt"):
        find_source(tmp_path, "auto")


def test_logs_of_another_folder_are_not_continued(tmp_path):
    inside, outside = write(tmp_path / "own/best.ckpt", 7), write(tmp_path / "other/last.ckpt", 7)
    assert find_source(tmp_path / "own", str(inside)) == ResumeSource(inside, {"metrics.csv": 7})
    assert find_source(tmp_path / "own", str(outside)) == ResumeSource(outside, {})


def test_a_huge_config_is_refused_unread(tmp_path):
    path = tmp_path / "config.yaml"
    path.touch()
    os.truncate(path, 2**40)  # a hole, which takes no disk
    with pytest.raises(ConfigError, match="damaged .*1048576 MB, a config has at most 16"):
        read_config(path, Path("last.ckpt"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "missing"),
        ("", "empty, or not a config"),
        ("seed: 1", "empty, or not a config"),
        ("a: [", "damaged"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nderived: {c: [*b, *b]}", "damaged .*aliases"),
        ("[" * 1000, "damaged"),  # deeper than Python recurses,
    ],
)
def test_a_config_that_cannot_be_read_is_an_error(tmp_path, content, problem):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{problem}.*run\.resume=last\.ckpt with another run\.name"):
        read_config(path, Path("last.ckpt"))
    path.write_text("derived: {size: large}")
    assert read_config(path, Path("last.ckpt")) == {"derived": {"size": "large"}}
