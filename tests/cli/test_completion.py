"""Shell completion of commands, options and overrides."""

import os

import pytest
from helpers.fresh_process import run_medconv

from medconv.cli.main import commands


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("medconv ", list(commands())),
        ("medconv pre", ["preprocess", "predict"]),
        ("medconv find-postprocessing --s", ["--runs", "--select", "--help", "--device", "--package"]),
        ("medconv train early_stopping=", ["early_stopping=none", "early_stopping=patience"]),
        ("medconv preprocess data=csv data.resi", ["data.resize="]),
        ("medconv train data=csv trainer.accel", ["trainer.accelerator="]),
    ],
)
def test_a_typed_line_is_completed_without_torch(line: str, completions: list[str]) -> None:
    process = run_medconv("-sc", "query=bash", **{**os.environ, "COMP_LINE": line})
    assert (process.returncode, process.stderr) == (0, "loaded\n")
    assert process.stdout.split() == completions
