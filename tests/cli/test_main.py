"""The command `medconv`: which subcommands there are, and what answers without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny

from medconv.cli.main import COMMANDS
from medconv.utils.exit_codes import DONE, USER

HEAVY = {"torch", "lightning", "monai", "scipy", "matplotlib"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_has_a_line_for_each_command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.call(monkeypatch, *arguments) == DONE
    said = capsys.readouterr().out
    assert said.startswith("example:\n  medconv train ")
    listed = said.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("prdict", "did you mean predict?"),
        ("find-postprocesing", "did you mean find-postprocessing?"),
        ("lunch", f"expected one of {', '.join(COMMANDS)}"),
        ("data=msd", f"expected one of {', '.join(COMMANDS)}"),
    ],
)
def test_an_unknown_command_is_one_error_with_the_nearest_one(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny.call(monkeypatch, name, "--input", "x") == USER
    assert capsys.readouterr().err == f"error: there is no command {name}; {hint}\n"


CODE = """
import sys
from medconv.cli.main import main
sys.argv = ["medconv", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded", *sorted(set(sys.modules) & {heavy}), file=sys.stderr)
"""


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`medconv` in a fresh process, which says last which heavy libraries it has loaded."""
    command = [sys.executable, "-c", CODE.replace("{heavy}", repr(HEAVY)), *arguments]
    return subprocess.run(
        command, env=environment or None, text=True, capture_output=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["train", "--hydra-help"],
        ["train", "--cfg", "job"],
        ["preprocess", "--cfg", "job", "data=phantom2d"],
        ["-sc", "install=bash"],
    ],
    ids=" ".join,
)
def test_what_only_shows_loads_no_torch(arguments: list[str]) -> None:
    done = in_a_process(*arguments)
    assert (done.returncode, done.stderr) == (0, "loaded\n") and done.stdout


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ["predict"],
            "error: the following arguments are required: --input, --output; options: medconv predict --help",
        ),
        (
            ["export", "--opset", "x"],
            "error: argument --opset: invalid int value: 'x'; options: medconv export --help",
        ),
        (
            ["evaluate", "--split", "val"],
            "error: the following arguments are required: --predictions, --output; options:",
        ),
    ],
)
def test_bad_options_are_one_error_without_torch(arguments: list[str], wanted: str) -> None:
    done = in_a_process(*arguments)
    said, loaded = done.stderr.splitlines()
    assert done.returncode == USER and said.startswith(wanted) and loaded == "loaded"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("medconv ", list(COMMANDS)),
        ("medconv pre", ["preprocess", "predict"]),
        ("medconv find-postprocessing --s", ["--runs", "--select", "--help", "--device", "--trust-package"]),
        ("medconv train early_stopping=", ["early_stopping=none", "early_stopping=patience"]),
        ("medconv preprocess data=csv data.resi", ["data.resize="]),
        ("medconv train data=csv trainer.accel", ["trainer.accelerator="]),
    ],
)
def test_completion(line: str, found: list[str]) -> None:
    done = in_a_process("-sc", "query=bash", **{**os.environ, "COMP_LINE": line})
    assert (done.returncode, done.stderr) == (0, "loaded\n")
    assert done.stdout.split() == found


def test_train_py_and_the_command_are_the_same(tmp_path: Path) -> None:
    asked = ["--cfg", "job", "-p", "trainer", "trainer.max_steps=3"]
    both = [tiny.command(name, *asked, cwd=tmp_path) for name in ("train.py", "train")]
    assert both[0].stdout == both[1].stdout and "max_steps: 3" in both[0].stdout
    both = [tiny.command(name, "--help", cwd=tmp_path) for name in ("train.py", "train")]
    assert both[0].stdout == both[1].stdout and both[0].stdout.startswith("example:\n  medconv train ")
