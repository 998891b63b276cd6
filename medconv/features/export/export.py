"""Export a network: TorchScript, ONNX or torch.export, weights, a MONAI bundle, or a model of nnU-Net."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path

from medconv.features.export.formats import OPSETS, check_format, read_written, write_network
from medconv.features.export.graph import Captured, capture
from medconv.features.export.metadata import Metadata, describe, metadata_path
from medconv.features.export.monai_bundle import MODEL, check_bundle, write_bundle
from medconv.features.export.nnunet import check_nnunet, larger_patch, prediction_notes, write_nnunet
from medconv.features.export.parity import on_case, on_patches
from medconv.features.export.safetensors_folder import MODEL as WEIGHTS
from medconv.features.export.safetensors_folder import card, check_safetensors, write_weights
from medconv.inference.load import LoadedModel, load
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import replacing, write_text
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import size_text

# Of the difference of logits, over the largest logit.
TOLERANCE = 1e-4
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportOptions:
    """How a network is written and compared.

    Args:
        format: one of `formats.FORMATS`.
        opset: of ONNX.
        case: an image to compare the logits on; None: random patches only.
        tolerance: the largest difference of logits that is allowed, over the largest logit.
    """

    format: str
    opset: int = OPSETS[0]
    case: Path | None = None
    tolerance: float = TOLERANCE

    @property
    def is_bundle(self) -> bool:
        return self.format == "bundle"

    @property
    def is_nnunet(self) -> bool:
        return self.format == "nnunet"

    @property
    def is_safetensors(self) -> bool:
        return self.format == "safetensors"

    @property
    def is_folder(self) -> bool:
        return self.is_bundle or self.is_nnunet or self.is_safetensors

    @property
    def file_format(self) -> str:
        """Of the network's file."""
        return "torchscript" if self.is_bundle else self.format


def export(source: Path, output: Path, choices: ExportOptions, trusted: Sequence[str] = ()) -> None:
    """Export the network of a checkpoint, compare its logits with the checkpoint's, and write its metadata.

    Args:
        source: the checkpoint.
        output: the file to write; for a bundle, a model of nnU-Net or safetensors, a new folder.
        choices: how it is written and compared.
        trusted: packages of your own that the network may come from.
    Raises:
        ArgumentError: an output or an opset that cannot be.
        ValueError: it cannot be exported, or its logits differ; then nothing is written.
    """
    check_format(choices.format, choices.opset)
    _check_output(output, choices, source)
    network = load(source, trusted, plain=True)
    # As it predicts, with our fast layers.
    reference = load(source, trusted)
    _check_fits(network, output, choices)
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    if choices.is_bundle:
        _export_bundle(output, choices, network, reference)
        log.info("%s, a MONAI bundle; docs/README.md in it has the command", output)
        return
    if choices.is_nnunet:
        _export_nnunet(output, choices, network, reference)
        return
    if choices.is_safetensors:
        _export_weights(output, choices, network, reference)
        return
    with replacing(output, durable=True) as partial:
        metadata = _export_file(partial, choices, network, reference)
    _write_metadata(metadata, output)
    log.info("%s, with its metadata %s", output, metadata_path(output).name)


def _export_bundle(
    output: Path, choices: ExportOptions, network: LoadedModel, reference: LoadedModel
) -> None:
    with _new_folder(output) as partial:
        model = partial / MODEL
        model.parent.mkdir(parents=True)
        metadata = _export_file(model, choices, network, reference)
        _write_metadata(metadata, model)
        write_bundle(partial, network, metadata, output.name)


def _export_nnunet(
    output: Path, choices: ExportOptions, network: LoadedModel, reference: LoadedModel
) -> None:
    assert network.path is not None
    with _new_folder(output) as partial:
        written = write_nnunet(partial, network, checkpoint_io.read(network.path), output.name)
        exported = replace(network, network=written)
        _parity(reference, exported, larger_patch(network), choices)
    log.info("%s, a model of nnU-Net v2", output)
    for note in prediction_notes(network, output):
        log.info("%s", note)


def _export_weights(
    output: Path, choices: ExportOptions, network: LoadedModel, reference: LoadedModel
) -> None:
    assert network.path is not None
    captured = capture(network)
    with _new_folder(output) as partial:
        file = partial / WEIGHTS
        exported = replace(network, network=write_weights(file, network))
        parity = _parity(reference, exported, captured.larger, choices)
        content = checkpoint_io.read(network.path)
        metadata = describe(content, network, captured, file, choices.format, parity)
        _write_metadata(metadata, file)
        write_text(partial / "README.md", card(network, metadata, output.name))
    log.info("%s, weights with their card, README.md: add the license before you publish them", output)


def _export_file(
    file: Path, choices: ExportOptions, network: LoadedModel, reference: LoadedModel
) -> Metadata:
    """Write the network's file and compare it with the checkpoint. Returns: its metadata."""
    captured = write_network(capture(network), choices.file_format, file, choices.opset)
    return _compare(file, choices, network, captured, reference)


def _compare(
    file: Path, choices: ExportOptions, network: LoadedModel, captured: Captured, reference: LoadedModel
) -> Metadata:
    """Compare the logits of an exported file with the checkpoint's.

    Args:
        file: the exported network.
        network: what it was captured from.
        reference: the checkpoint's network, as it predicts.
    Returns:
        The metadata of the file.
    Raises:
        ValueError: the logits differ.
    """
    assert network.path is not None
    content = checkpoint_io.read(network.path)
    exported = replace(network, network=read_written(file, choices.file_format), path=file)
    parity = _parity(reference, exported, captured.larger, choices)
    metadata = describe(content, network, captured, file, choices.file_format, parity)
    if choices.file_format == "onnx":
        metadata["opset"] = choices.opset
    return metadata


def _parity(
    reference: LoadedModel, exported: LoadedModel, larger: Sequence[int], choices: ExportOptions
) -> Metadata:
    """The largest difference of the logits, and on what.

    Args:
        larger: another size of images than the patch's, where the network takes one.
    Raises:
        ValueError: above the tolerance.
    """
    largest = on_patches(reference, exported, larger)
    inputs = "random patches"
    if choices.case is not None:
        difference, size = on_case(reference, exported, choices.case)
        largest = max(largest, difference)
        inputs = f"a case of {size_text(size)} voxels, and random patches"
    log.info("logits differ from the checkpoint's by at most %.2g, on %s", largest, inputs)
    # `not <=` and not `>`: NaN must fail, too.
    if not largest <= choices.tolerance:
        raise ValueError(
            f"{reference.path}: as {choices.format} its logits differ by {largest:.2g} (on {inputs}), more "
            f"than the tolerance of {choices.tolerance:g}; nothing was written"
        )
    return {"largest_difference": largest, "tolerance": choices.tolerance, "inputs": inputs}


def _write_metadata(metadata: Metadata, model: Path) -> None:
    write_text(metadata_path(model), json.dumps(metadata, indent=2) + "\n")


def _check_output(output: Path, choices: ExportOptions, source: Path) -> None:
    problem = ""
    nearest = next(path for path in output.absolute().parents if path.exists())
    if not nearest.is_dir():
        problem = f"{nearest} is no folder"
    elif choices.is_folder and (output.exists() or output.is_symlink()):
        problem = f"exists already; the format {choices.format} needs a new folder"
    elif output.is_dir():
        problem = "is a folder, expected the name of a file"
    elif output.exists() and source.exists() and output.samefile(source):
        problem = "is the checkpoint itself, expected another name"
    if problem:
        raise ArgumentError("output", f" {output}: {problem}")


def _check_fits(network: LoadedModel, output: Path, choices: ExportOptions) -> None:
    """Raises: ValueError: the format cannot hold the network, or a package that writes it is missing."""
    if choices.is_bundle:
        check_bundle(network)
    elif choices.is_nnunet:
        check_nnunet(network, output)
    elif choices.is_safetensors:
        check_safetensors()


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """As `atomic_io.replacing`, for a folder that does not exist yet.

    Raises: ArgumentError: it exists in the end, and is not empty.
    """
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    for left in _left_behind(path):
        log.warning("%s: left by an export that was killed, if none is running on another machine", left)
    try:
        partial.mkdir()
        yield partial
        try:
            partial.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ArgumentError("output", f" {path}: exists by now; another export has written it") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _left_behind(path: Path) -> list[Path]:
    """The partial folders of exports to this path that no process of this machine is writing."""
    partials = path.parent.glob(f".*.{escape(path.name)}")
    process_ids = {partial: partial.name.split(".")[1] for partial in partials}
    return [
        partial
        for partial, process_id in process_ids.items()
        if process_id.isdecimal() and not _is_running(int(process_id))
    ]


def _is_running(process_id: int) -> bool:
    """Whether this machine has such a process; on Windows, where a process cannot be asked, it may have."""
    if os.name == "nt":
        return True  # os.kill would end it
    try:
        os.kill(process_id, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
