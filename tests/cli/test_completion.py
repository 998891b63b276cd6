"""Shell completion of commands, options and overrides."""

import pytest
from helpers.fresh_process import in_turn

from medconv.cli.main import commands

COMPLETIONS = {
    "medconv ": list(commands()),
    "medconv pre": ["preprocess", "predict"],
    "medconv find-postprocessing --s": ["--runs", "--select", "--help", "--device", "--package"],
    "medconv train early_stopping=": ["early_stopping=none", "early_stopping=patience"],
    "medconv preprocess data=csv data.resi": ["data.resize="],
    "medconv train data=csv trainer.accel": ["trainer.accelerator="],
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_a_typed_line_is_completed_without_torch(line):
    all_ended = in_turn(*((line, "-sc", "query=bash") for line in COMPLETIONS), line=True)
    ended = all_ended[list(COMPLETIONS).index(line)]
    assert (ended.code, ended.err, ended.loaded) == (0, "", [])
    assert ended.out.split() == COMPLETIONS[line]
