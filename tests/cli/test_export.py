"""Options of `medconv export`."""

from medconv.cli import export
from medconv.export import export as exporting
from medconv.export.formats import FORMATS, OPSETS


def test_formats_and_defaults_equal_those_of_the_export_package() -> None:
    assert set(export.FORMATS) == set(FORMATS)
    assert (OPSETS[0], exporting.TOLERANCE) == (export.OPSET, export.TOLERANCE)


def test_trust_package_may_be_repeated() -> None:
    arguments = "--checkpoint a --trust-package x --trust-package y --format onnx --output o"
    assert export.parser().parse_args(arguments.split()).trust_package == ["x", "y"]
