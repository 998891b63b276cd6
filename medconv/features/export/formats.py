"""A network in one file: TorchScript, torch.export (pt2) or ONNX; read back by the process that wrote it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medconv.features.export.graph import Captured, capture, quiet
from medconv.features.export.job import OPSETS, Format, Job
from medconv.features.export.metadata import Metadata, metadata_path
from medconv.inference.load import LoadedModel
from medconv.utils.errors import with_class

log = logging.getLogger(__name__)
# Names of input and output in an ONNX file.
INPUT = "image"
OUTPUT = "logits"


class NetworkFile(Format):
    """One file, with its metadata beside it. Args: name: of the format."""

    takes_mean = True

    def __init__(self, name: str) -> None:
        self._name = name

    def check_packages(self) -> None:
        if self._name == "onnx":
            _need(("onnx", "onnxscript", "onnxruntime"))

    def write(self, path: Path, job: Job) -> Metadata:
        opset = job.choices.opset or OPSETS[0]
        captured = write_network(capture(job.model), self._name, path, opset)
        parity = job.compare(read_written(path, self._name), captured.larger)
        metadata = job.describe(path, self._name, captured, parity)
        if self._name == "onnx":
            metadata["opset"] = opset
        return metadata

    def notes(self, model: LoadedModel, output: Path) -> list[str]:
        return [f"{output}, with its metadata {metadata_path(output).name}"]


TORCHSCRIPT = NetworkFile("torchscript")
PT2 = NetworkFile("pt2")
ONNX = NetworkFile("onnx")


def write_network(captured: Captured, format: str, path: Path, opset: int) -> Captured:
    """Write the network to a file.

    Args:
        format: torchscript, onnx or pt2.
        opset: for ONNX only.
    Returns:
        The network, with the sizes that the file takes.
    Raises:
        ValueError: torch cannot write the network in this format.
    """
    try:
        with quiet(), torch.no_grad():
            written = _write(captured, format, path, opset)
    except (OSError, KeyboardInterrupt):
        raise
    # torch has many classes for what it cannot write.
    except Exception as error:
        raise ValueError(f"the network cannot be written as {format} ({with_class(error)})") from error
    if written.dynamic != captured.dynamic:
        log.info("as %s, the network takes images of the patch's size alone", format)
    return written


def read_written(path: Path, format: str) -> nn.Module:
    """The network of a file that this process has just written: one from elsewhere could run code.

    Args:
        format: torchscript, onnx or pt2.
    """
    if format == "onnx":
        return _read_onnx(path)
    with quiet(), path.open("rb") as file:
        if format == "torchscript":
            network: nn.Module = torch.jit.load(file)
            return network.eval()
        return torch.export.load(file).module(check_guards=False)


def _need(packages: Sequence[str]) -> list[Any]:
    """Import packages of the extra `onnx`. Raises: ValueError: one is missing."""
    try:
        return [import_module(name) for name in packages]
    except ImportError as error:
        raise ValueError(f"the format onnx needs {error.name}: pip install 'medconv[onnx]'") from error


def _write(captured: Captured, format: str, path: Path, opset: int) -> Captured:
    if format == "torchscript":
        return _write_torchscript(captured, path)
    if format == "onnx":
        _write_onnx(captured, path, opset)
    else:
        with path.open("wb") as file:
            torch.export.save(captured.program, file)
    return captured


def _write_torchscript(captured: Captured, path: Path) -> Captured:
    # A trace records one path through the code; torch.export has shown that there is no other.
    traced = torch.jit.trace(captured.module, captured.example, check_trace=False)
    # Not to the file: on a full disk its writer in C++ would end the process
    torch.jit.save(traced, buffer := BytesIO())
    path.write_bytes(buffer.getbuffer())
    if not any(captured.dynamic) or _takes_other_sizes(traced, captured):
        return captured
    return replace(captured, dynamic=(False,) * len(captured.dynamic))


def _takes_other_sizes(traced: Any, captured: Captured) -> bool:
    """Whether a trace takes them; it may hold numbers of the patch's size, as that of attention windows."""
    try:
        traced(torch.zeros(1, captured.example.shape[1], *captured.larger))
    except RuntimeError:
        return False
    return True


def _write_onnx(captured: Captured, path: Path, opset: int) -> None:
    torch.onnx.export(
        captured.program,
        (),
        str(path),
        input_names=[INPUT],
        output_names=[OUTPUT],
        opset_version=opset,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    (onnx,) = _need(["onnx"])
    opsets = {entry.domain: entry.version for entry in onnx.load(str(path)).opset_import}
    # The domain of ONNX's own operators has no name.
    written = opsets[""]
    # torch keeps its opset if it cannot convert it.
    if written != opset:
        raise ValueError(f"it can only be written for opset {written}, not {opset}")


def _read_onnx(path: Path) -> nn.Module:
    (runtime,) = _need(["onnxruntime"])
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    # Errors alone.
    settings.log_severity_level = 3
    return _OnnxNetwork(runtime.InferenceSession(path, settings, providers=["CPUExecutionProvider"]))


class _OnnxNetwork(nn.Module):
    """A session of the ONNX runtime as a module. It has its own threads, and no gradients.

    Shape: (batch, channels, *spatial) -> (batch, outputs, *spatial) float32, on the CPU.
    """

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session

    def forward(self, image: Tensor) -> Tensor:
        (logits,) = self.session.run([OUTPUT], {INPUT: image.contiguous().numpy()})
        return torch.from_numpy(logits)
