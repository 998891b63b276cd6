"""`medconv export`: a network as a TorchScript, ONNX or torch.export file, or a MONAI bundle, with
metadata.
"""

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
from medconv.export.formats import FORMATS, OPSETS, check_format, read_written, write_network
from medconv.export.graph import Captured, capture
from medconv.export.metadata import as_markdown, describe
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
    """Args: case: an image to compare the logits on; None: random patches only. tolerance: the largest
    difference of logits that is allowed.
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
    choices = ExportOptions(options.format, options.opset, options.case, options.tolerance)
    export(options.checkpoint, options.output, choices, options.trust_package)
    return DONE


def export(source: Path, output: Path, choices: ExportOptions, trusted: Sequence[str] = ()) -> None:
    """Export the network of a checkpoint, compare its logits with the checkpoint's, and write its metadata.

    Args: trusted: packages of your own that the network may come from.
    Raises: ValueError: it cannot be exported, or its logits differ; then nothing is written.
    """
    check_format(choices.format, choices.opset)
    _check_output(output, choices.format, source)
    network, is_bundle = load(source, trusted, plain=True), choices.format == "bundle"
    if is_bundle:
        check_bundle(network)
    captured = capture(network)
    with _new_folder(output) if is_bundle else replacing(output, durable=True) as partial:
        model = partial / MODEL if is_bundle else partial
        model.parent.mkdir(parents=True, exist_ok=True)
        captured = write_network(captured, _file_format(choices), model, choices.opset)
        metadata = _compare(source, model, choices, network, captured, load(source, trusted))
        if is_bundle:
            _write_metadata(metadata, model)
            write_bundle(partial, network, metadata, output.name)
    if is_bundle:
        log.info("%s, a MONAI bundle; docs/README.md in it has the command", output)
        return
    _write_metadata(metadata, output)
    log.info("%s, with its metadata %s", output, metadata_path(output).name)


def _file_format(choices: ExportOptions) -> str:
    return "torchscript" if choices.format == "bundle" else choices.format


def _compare(
    source: Path,
    file: Path,
    choices: ExportOptions,
    network: LoadedModel,
    captured: Captured,
    reference: LoadedModel,
) -> Metadata:
    """Compare the logits of an exported file with the checkpoint's; returns its metadata. Raises: ValueError:
    they differ.
    """
    format, content = _file_format(choices), checkpoint_io.read(source)
    metadata = describe(content, network, captured, file, format, {"largest_difference": 0.0, "inputs": ""})
    exported = as_loaded_model(metadata, read_written(file, format), file, None)
    largest, inputs = on_patches(reference, exported, captured), "random patches"
    if choices.case is not None:
        difference, shape = on_case(reference, exported, choices.case)
        largest = max(largest, difference)
        inputs = f"a case of {' x '.join(map(str, shape))} voxels, and random patches"
    log.info("logits differ from the checkpoint's by at most %.2g, on %s", largest, inputs)
    if not largest <= choices.tolerance:
        raise ValueError(
            f"{source}: as {choices.format} its logits differ by {largest:.2g} (on {inputs}), more than "
            f"--tolerance {choices.tolerance:g}; nothing was written"
        )
    if choices.case is None:
        log.info("--case IMAGE compares the logits on a real case, too")
    parity = {"largest_difference": largest, "tolerance": choices.tolerance, "inputs": inputs}
    opset = {"opset": choices.opset} if format == "onnx" else {}
    return {**metadata, **opset, "parity": tuples_to_lists(parity)}


def _write_metadata(metadata: Metadata, model: Path) -> None:
    write_text(model.with_name(model.name + ".md"), as_markdown(metadata, model.name))
    write_text(metadata_path(model), json.dumps(metadata, indent=2) + "\n")


def _check_output(output: Path, format: str, source: Path) -> None:
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: no such folder, {output.parent}")
    if format == "bundle" and (output.exists() or output.is_symlink()):
        raise ValueError(f"--output {output}: exists already; a bundle needs a new folder")
    if output.is_dir():
        raise ValueError(f"--output {output}: is a folder, expected the name of a file")
    if output.exists() and source.exists() and output.samefile(source):
        raise ValueError(f"--output {output}: is the checkpoint itself, expected another name")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """As `atomic_io.replacing`, for a folder that does not exist yet."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        partial.mkdir()
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
