"""`medconv export`: its options reach the export."""

from argparse import Namespace
from pathlib import Path

import pytest

from medconv.cli import export_command
from medconv.export.export import ExportOptions

OPTIONS = {
    "checkpoint": Path("a.ckpt"),
    "output": Path("a.onnx"),
    "format": "onnx",
    "opset": 20,
    "case": Path("case.nii"),
    "tolerance": 1e-3,
    "trust_package": ["mine"],
}


def test_each_option_reaches_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr(export_command, "export", lambda *arguments: calls.append(arguments))
    assert export_command.run_command(Namespace(**OPTIONS)) == 0
    choices = ExportOptions("onnx", 20, Path("case.nii"), 1e-3)
    assert calls == [(Path("a.ckpt"), Path("a.onnx"), choices, ["mine"])]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="^--format must be one of torchscript, onnx, pt2, bundle, nnunet, safetensors, got h5$",
    ):
        export_command.run_command(Namespace(**{**OPTIONS, "format": "h5"}))
