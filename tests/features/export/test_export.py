"""`medconv export`: its options, folders and errors."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
from helpers import exports, ranks
from helpers.exports import refusal

from medconv.features.export import command, export, job
from medconv.features.export.export import _new_folder
from medconv.features.export.job import OPSETS, ExportOptions
from medconv.utils.errors import ArgumentError


def test_the_command_as_a_user_starts_it(exported, tmp_path):
    arguments = (
        "--checkpoint",
        str(exported.checkpoint),
        "--format",
        "torchscript",
        "--output",
        "new/folder/m.ts",
    )
    process = ranks.command("export", *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "logits differ from the checkpoint's by at most" in process.stdout
    assert "random patches" in process.stdout
    assert "--case IMAGE" in process.stdout and not process.stderr.strip()
    assert {path.name for path in (tmp_path / "new/folder").iterdir()} == {"m.ts", "m.ts.json"}


def test_logits_that_differ_leave_no_file(exported, tmp_path, monkeypatch, capsys):
    before = {*tmp_path.iterdir()}
    for format, name in (("torchscript", "m.ts"), ("bundle", "folder")):
        arguments = ("--checkpoint", exported.checkpoint, "--format", format, "--output", tmp_path / name)
        error = refusal(monkeypatch, capsys, "export", *arguments, "--tolerance", "-1")
        assert "its logits differ by" in error and "nothing was written" in error
        assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda record: record["targets"].update(ignore=9), "members/2.*: its targets differ from those of"),
        (
            lambda record: record["config"]["task"].update(overlap=0.75),
            "members/2.*: has another preprocessing or window than",
        ),
    ],
)
def test_no_mean_is_written_of_networks_that_are_used_differently(edit, message, exported, tmp_path):
    for folder, change in (("checkpoints", lambda record: None), ("members/2/checkpoints", edit)):
        (tmp_path / folder).mkdir(parents=True)
        exports.variant(exported.checkpoint, tmp_path / folder / "best.ckpt", change)
    with pytest.raises(ValueError, match=message):
        export.export(tmp_path, tmp_path / "mean.ts", ExportOptions("torchscript"))
    assert not (tmp_path / "mean.ts").exists()


def test_bad_options_are_one_error_and_write_nothing(exported, tmp_path, monkeypatch, capsys):
    branching = exports.variant(
        exported.checkpoint,
        tmp_path / "b.ckpt",
        lambda record: record["config"]["model"].update(_target_="helpers.exports.Branching"),
    )
    checkpoint, pt2 = ("--checkpoint", exported.checkpoint), ("--format", "pt2")
    good = (*checkpoint, "--output", tmp_path / "m.ts")
    for arguments, message in (
        (
            (*good, "--format", "keras"),
            "--format must be one of torchscript, pt2, onnx, bundle, safetensors, nnunet, got keras",
        ),
        (
            (*good, "--format", "onnx", "--opset", "7"),
            f"--opset must lie between {OPSETS[0]} and {OPSETS[-1]}, got 7",
        ),
        (
            (*good, *checkpoint, *pt2),
            "--checkpoint takes one network here, or the folder of a run for the mean",
        ),
        ((*good, *pt2, "--opset", "20"), "--opset 20: is of ONNX, and the format is pt2"),
        (("--checkpoint", tmp_path / "no.ckpt", "--output", tmp_path / "m", *pt2), "no such checkpoint"),
        ((*checkpoint, "--output", tmp_path / "b.ckpt/m", *pt2), "b.ckpt is not a folder"),
        (
            (*good, "--format", "bundle", "--output", exported.images),
            "exists already; the format bundle needs a new folder",
        ),
        ((*good, *pt2, "--output", exported.images), "is a folder, expected the name of a file"),
        (
            (*checkpoint, *pt2, "--output", exported.checkpoint),
            "is the checkpoint itself, expected another name",
        ),
        ((*good, *pt2, "--case", exported.images), "expected one case, found 7"),
        (
            ("--checkpoint", branching, *good[2:], *pt2, "--package", "helpers"),
            "Branching, cannot be exported",
        ),
    ):
        assert message in refusal(monkeypatch, capsys, "export", *arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"b.ckpt"}


def test_what_a_killed_export_left_behind_is_named(tmp_path, monkeypatch, caplog):
    """Not what belongs to an export that is running, as this process is; also where there is no /proc."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    killed = tmp_path / ".4194305.model"  # more than the kernel's highest process id
    for folder in (killed, tmp_path / f".{os.getppid()}.model", tmp_path / ".notes.model"):
        folder.mkdir()
    with _new_folder(tmp_path / "model"):
        pass
    assert caplog.messages == [
        f"{killed}: left by an export that was killed, if none is running on another machine"
    ]


def test_of_two_exports_into_one_folder_the_later_is_refused(tmp_path):
    """Both began before it existed; the first one's files stay."""
    folder = tmp_path / "model"
    refused = pytest.raises(ArgumentError, match=f"output {folder}: exists by now; another export")
    with refused, _new_folder(folder) as later:
        (later / "file").write_text("later")
        earlier = tmp_path / "earlier"
        earlier.mkdir()
        (earlier / "file").write_text("first")
        earlier.rename(folder)
    assert (folder / "file").read_text() == "first" and [path.name for path in tmp_path.iterdir()] == [
        "model"
    ]


OPTIONS = {
    "checkpoint": [Path("a.ckpt")],
    "output": Path("a.onnx"),
    "format": "onnx",
    "opset": 20,
    "case": Path("case.nii"),
    "tolerance": 1e-3,
    "package": ["mine"],
}


def test_defaults_equal_those_of_the_function():
    assert (job.OPSETS[0], job.TOLERANCE) == (command.OPSET, command.TOLERANCE)


def test_packages_may_be_repeated():
    arguments = "--checkpoint a --package x --package y --format onnx --output o"
    assert command.parser().parse_args(arguments.split()).package == ["x", "y"]


def test_each_option_reaches_the_export(monkeypatch):
    calls = []
    monkeypatch.setattr(export, "export", lambda *arguments: calls.append(arguments))
    assert command.run_command(Namespace(**OPTIONS)) == 0
    choices = ExportOptions("onnx", 20, Path("case.nii"), 1e-3)
    assert calls == [(Path("a.ckpt"), Path("a.onnx"), choices, ["mine"])]


def test_an_unknown_format_is_refused():
    with pytest.raises(
        ArgumentError,
        match="^format must be one of torchscript, pt2, onnx, bundle, safetensors, nnunet, got h5$",
    ):
        command.run_command(Namespace(**{**OPTIONS, "format": "h5"}))
