"""`medconv export`: its options, and that they reach the export."""

from argparse import Namespace
from pathlib import Path

import pytest

from medconv.features.export import command, export, job
from medconv.features.export.job import ExportOptions
from medconv.utils.errors import ArgumentError

OPTIONS = {
    "checkpoint": Path("a.ckpt"),
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
