"""The command `medconv`: its subcommands, help, flags and completion, and answers without torch."""

import os
import re
import subprocess
import sys
from argparse import Namespace

import pytest
from helpers import tiny
from helpers.fresh_process import in_turn

from medconv import __version__, config, doors
from medconv.cli.main import commands, run
from medconv.cli.parsers import arguments_as_flags, flag_of
from medconv.utils.errors import ArgumentError
from medconv.utils.exit_codes import DONE, USER


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_has_a_line_for_each_command(arguments, monkeypatch, capsys):
    assert tiny.call(monkeypatch, *arguments) == DONE
    output = capsys.readouterr().out
    assert output.startswith("example:\n  medconv train ")
    lines = output.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(commands())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("prdict", "did you mean predict?"),
        ("find-postprocesing", "did you mean find-postprocessing?"),
        ("lunch", f"expected one of {', '.join(commands())}"),
        ("data=msd", f"expected one of {', '.join(commands())}"),
    ],
)
def test_an_unknown_command_is_one_error_that_suggests_the_nearest(name, hint, monkeypatch, capsys):
    assert tiny.call(monkeypatch, name, "--input", "x") == USER
    assert capsys.readouterr().err == f"error: there is no command {name}; {hint}\n"


PRINTED = [
    ("--help",),
    *((name, "--help") for name in commands()),
    ("--version",),
    ("train", "--version"),
    ("train", "--hydra-help"),
    ("train", "--cfg", "job"),
    ("preprocess", "--cfg", "job", "data=phantom2d"),
    ("-sc", "install=bash"),
]


@pytest.mark.parametrize("arguments", PRINTED, ids=" ".join)
def test_help_and_printed_configs_load_no_torch(arguments):
    ended = in_turn(*PRINTED)[PRINTED.index(arguments)]
    assert (ended.code, ended.err, ended.loaded) == (0, "", []) and ended.out


@pytest.mark.parametrize("module", ["medconv", "medconv.cli"])
def test_python_m_is_the_command(module):
    command = [sys.executable, "-m", module, "--version"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (DONE, f"medconv {__version__}\n", "")


NO_RUNS = [
    "predict --checkpoint none --input none --output none",
    "evaluate --predictions none --references none --output none.json",
    "export --checkpoint none --format onnx --output none",
    "find-postprocessing --runs none",
]


@pytest.mark.parametrize("arguments", NO_RUNS)
def test_commands_that_make_no_run_load_no_lightning(arguments):
    ended = in_turn(*(tuple(words.split()) for words in NO_RUNS))[NO_RUNS.index(arguments)]
    assert ended.code == USER and ended.err.startswith("error: ")
    assert "torch" in ended.loaded and "lightning" not in ended.loaded


WRONG = {
    (
        "predict",
    ): "the following arguments are required: --checkpoint, --input, --output; options: medconv predict --help",
    ("export", "--opset", "x"): "argument --opset: invalid int value: 'x'; options: medconv export --help",
    ("predict", "--chekpoint", "best.ckpt"): "there is no option --chekpoint; did you mean --checkpoint?",
    ("train", "--max-steps=3"): "there is no flag --max-steps=3; keys are written as in trainer.max_steps=20",
    ("train", "--config-dir"): "argument --config-dir/-cd: expected one argument; flags: medconv",
    ("export", "--zzz=1"): "there is no option --zzz; options: medconv export --help",
    ("evaluate", "--split", "val"): "the following arguments are required: --predictions, --output; options:",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_bad_options_are_one_error_without_torch(arguments):
    ended = in_turn(*WRONG)[list(WRONG).index(arguments)]
    (error,) = ended.err.splitlines()
    assert (ended.code, ended.loaded) == (USER, []) and error.startswith(f"error: {WRONG[arguments]}")


def test_another_operating_system_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        ValueError, match="medconv train runs on Linux only, and this is darwin; use WSL or a container"
    ):
        run(["train", "data=phantom2d"])
    with pytest.raises(ValueError, match="the following arguments are required: --checkpoint"):
        run(["predict"])


def test_the_backend_of_a_notebook_is_not_inherited(monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    tiny.call(monkeypatch, "--version")
    assert os.environ["MPLBACKEND"] == "agg"
    monkeypatch.setenv("MPLBACKEND", "svg")
    tiny.call(monkeypatch, "--version")
    assert os.environ["MPLBACKEND"] == "svg"


COMPLETIONS = {
    "medconv ": list(commands()),
    "medconv pre": ["preprocess", "predict"],
    "medconv find-postprocessing --s": ["--runs", "--select", "--help", "--device", "--package"],
    "medconv train early_stopping=": ["early_stopping=none", "early_stopping=patience"],
    "medconv preprocess data=csv data.resi": ["data.resize="],
    "medconv train data=csv trainer.accel": ["trainer.accelerator="],
    "medconv ensemble --members 3 early_stopping=": ["early_stopping=none", "early_stopping=patience"],
    "medconv preprocess --check-only data=csv data.resi": ["data.resize="],
    "medconv train --pack": ["--help", "--package"],
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_a_typed_line_is_completed_without_torch(line):
    all_ended = in_turn(*((line, "-sc", "query=bash") for line in COMPLETIONS), line=True)
    ended = all_ended[list(COMPLETIONS).index(line)]
    assert (ended.code, ended.err, ended.loaded) == (0, "", [])
    assert ended.out.split() == COMPLETIONS[line]


def test_the_flag_of_an_option_stands_in_the_place_of_the_argument():
    assert flag_of("mirror_axes") == "--mirror-axes"
    with (
        pytest.raises(ValueError, match="^--mirror-axes=.5. is too large$"),
        arguments_as_flags(Namespace(mirror_axes=[5])),
    ):
        raise ArgumentError("mirror_axes", "=[5] is too large")


def test_an_argument_that_is_no_option_keeps_its_name():
    with (
        pytest.raises(ArgumentError, match=r"^task\.overlap is 2$"),
        arguments_as_flags(Namespace(overlap=1)),
    ):
        raise ArgumentError("task.overlap", " is 2")


@pytest.mark.parametrize("command", ["train", "preprocess"])
def test_help_names_every_group_and_option_of_the_config(command, monkeypatch, capsys):
    tiny.call(monkeypatch, command, "--help")
    output = capsys.readouterr().out
    for file in config.conf_dir().glob("*/*.yaml"):
        assert f"  {file.parent.name} " in output
        assert bool(re.search(rf"\b{file.stem}\b", output)) == (file.stem != "base")


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
