"""A trained network as a TorchScript, ONNX or torch.export file, or as a MONAI bundle, with its metadata."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from medconv.config import tuples_to_lists
from medconv.export.formats import FORMATS, OPSETS, check_opset, read_written, write_network
from medconv.export.graph import Captured, capture
from medconv.export.metadata import describe, in_words
from medconv.export.monai_bundle import MODEL, check_bundle, write_bundle
from medconv.export.parity import on_case, on_patches
from medconv.inference.exported.metadata import Metadata, as_loaded_model, metadata_path
from medconv.inference.load import LoadedModel, load
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import replacing, write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

TOLERANCE = 1e-4  # of logits
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """Args: case: an image to compare on; None: random patches alone. tolerance: of the logits' largest
    difference.
    """

    format: str
    opset: int = OPSETS[0]
    case: Path | None = None
    tolerance: float = TOLERANCE


def run_command(options: argparse.Namespace) -> int:
    """`medconv export` with these options. Returns: the exit code."""
    start_logging()
    if options.format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {options.format}")
    wanted = ExportOptions(options.format, options.opset, options.case, options.tolerance)
    export(options.checkpoint, options.output, wanted, options.trust_package)
    return DONE


def export(source: Path, output: Path, wanted: ExportOptions, trusted: Sequence[str] = ()) -> None:
    """Write the network of a checkpoint, compare it with the checkpoint, and put a metadata beside it.

    Args: trusted: packages of your own that the network may come from.
    Raises: ValueError: it cannot be exported, or its logits differ; then nothing is left behind.
    """
    check_opset(wanted.opset)
    _check_output(output, wanted.format, source)
    network = load(source, trusted, plain=True)
    if wanted.format == "bundle":
        check_bundle(network)
    captured = capture(network)
    make = _bundle if wanted.format == "bundle" else _file
    make(source, output, wanted, network, captured, load(source, trusted))


def _file(
    source: Path,
    output: Path,
    wanted: ExportOptions,
    network: LoadedModel,
    captured: Captured,
    reference: LoadedModel,
) -> None:
    with replacing(output, durable=True) as partial:
        write_network(captured, wanted.format, partial, wanted.opset)
        metadata = _compared(source, partial, wanted, network, captured, reference)
    _write_metadata(metadata, output)
    log.info("%s, with its metadata %s", output, metadata_path(output).name)


def _bundle(
    source: Path,
    output: Path,
    wanted: ExportOptions,
    network: LoadedModel,
    captured: Captured,
    reference: LoadedModel,
) -> None:
    with _new_folder(output) as partial:
        model = partial / MODEL
        model.parent.mkdir(parents=True)
        write_network(captured, "torchscript", model, wanted.opset)
        metadata = _compared(source, model, wanted, network, captured, reference)
        _write_metadata(metadata, model)
        write_bundle(partial, network, metadata, output.name)
    log.info("%s, a MONAI bundle; docs/README.md in it has the command", output)


def _compared(
    source: Path,
    file: Path,
    wanted: ExportOptions,
    network: LoadedModel,
    captured: Captured,
    reference: LoadedModel,
) -> Metadata:
    """The metadata of a file, once it says what the checkpoint says. Raises: ValueError: it does not."""
    format = "torchscript" if wanted.format == "bundle" else wanted.format
    content = checkpoint_io.read(source)
    metadata = describe(content, network, captured, file, format, {"largest_difference": 0.0, "of": ""})
    read = as_loaded_model(metadata, read_written(file, format), file, None)
    largest, of = on_patches(reference, read, captured), "random patches"
    if wanted.case is not None:
        of_case, shape = on_case(reference, read, wanted.case)
        largest, of = (
            max(largest, of_case),
            f"{wanted.case.name}, {' x '.join(map(str, shape))} voxels, and random patches",
        )
    log.info("logits differ from the checkpoint's by at most %.2g, on %s", largest, of)
    if not largest <= wanted.tolerance:
        raise ValueError(
            f"{source}: as {wanted.format} its logits differ by {largest:.2g} (on {of}), more than "
            f"--tolerance {wanted.tolerance:g}; nothing was written"
        )
    if wanted.case is None:
        log.info("--case IMAGE compares them on a real case, too")
    parity = {"largest_difference": largest, "tolerance": wanted.tolerance, "of": of}
    opset = {"opset": wanted.opset} if format == "onnx" else {}
    return {**metadata, **opset, "parity": tuples_to_lists(parity)}


def _write_metadata(metadata: Metadata, model: Path) -> None:
    write_text(model.with_name(model.name + ".md"), in_words(metadata, model.name))
    write_text(metadata_path(model), json.dumps(metadata, indent=2) + "\n")


def _check_output(output: Path, format: str, source: Path) -> None:
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: no such folder, {output.parent}")
    if format == "bundle" and (output.exists() or output.is_symlink()):
        raise ValueError(f"--output {output}: is there already; a bundle is a new folder")
    if output.is_dir():
        raise ValueError(f"--output {output}: is a folder, expected the name of a file")
    if output.exists() and source.exists() and output.samefile(source):
        raise ValueError(f"--output {output}: is the checkpoint itself, expected another name")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """As `atomic.replacing`, for a folder that is not there yet."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        partial.mkdir()
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
