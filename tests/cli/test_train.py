"""`medconv train` and `python train.py`: help and printed configs."""

from pathlib import Path

from helpers import tiny


def test_train_py_prints_the_same_as_medconv_train(tmp_path: Path) -> None:
    arguments = ["--cfg", "job", "-p", "trainer", "trainer.max_steps=3"]
    script, command = (tiny.command(name, *arguments, cwd=tmp_path).stdout for name in ("train.py", "train"))
    assert script == command and "max_steps: 3" in script
    script, command = (tiny.command(name, "--help", cwd=tmp_path).stdout for name in ("train.py", "train"))
    assert script == command and script.startswith("example:\n  medconv train ")


def test_a_resolved_config_is_printed_without_interpolations(tmp_path: Path) -> None:
    done = tiny.command("train", "--cfg", "job", "--resolve", "trainer.max_steps=3", cwd=tmp_path)
    assert done.returncode == 0 and "${" not in done.stdout and "max_steps: 3" in done.stdout
    assert "channels: '(from the data: channels)'" in done.stdout
