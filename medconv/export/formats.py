"""Write a captured network to a file, and read it back in the process that wrote it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medconv.export.graph import Captured
from medconv.inference.exported.load import INPUT, OUTPUT, need, quiet, read_onnx
from medconv.utils.errors import with_class

log = logging.getLogger(__name__)
FORMATS = ("torchscript", "onnx", "pt2", "bundle")
OPSETS = range(18, 24)  # of ONNX; torch writes 18 and converts it to later ones


def write_network(captured: Captured, format: str, path: Path, opset: int) -> Captured:
    """Returns: the network, with the sizes that the file takes. Args: opset: for ONNX only.

    Raises: ValueError: torch cannot write the network in this format.
    """
    fixed = False
    try:
        with quiet(), torch.no_grad():
            if format == "onnx":
                _write_onnx(captured, path, opset)
            elif format == "torchscript":
                # A trace records one path through the code; torch.export has shown that there is no other.
                traced = torch.jit.trace(captured.module, captured.example, check_trace=False)
                fixed = any(captured.dynamic) and not _takes_more(traced, captured)
                torch.jit.save(traced, str(path))
            else:
                with path.open("wb") as file:
                    torch.export.save(captured.program, file)
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:  # torch has many classes for what it cannot write
        raise ValueError(f"the network cannot be written as {format} ({with_class(error)})") from error
    if not fixed:
        return captured
    log.info("as torchscript, the network takes images of the patch's size alone")
    return replace(captured, dynamic=(False,) * len(captured.dynamic))


def _takes_more(traced: Any, captured: Captured) -> bool:
    """Whether a trace takes other sizes; it may hold numbers of the patch's, as that of attention windows."""
    try:
        traced(torch.zeros(1, captured.example.shape[1], *captured.larger))
    except RuntimeError:
        return False
    return True


def read_written(path: Path, format: str) -> nn.Module:
    """The network of a file that this process has just written: one from elsewhere could run code.

    Raises: ValueError: as `read_onnx`, for ONNX only.
    """
    if format == "onnx":
        return read_onnx(path, "cpu")
    with quiet(), path.open("rb") as file:
        if format == "torchscript":
            network: nn.Module = torch.jit.load(file)
            return network.eval()
        return torch.export.load(file).module(check_guards=False)


def check_format(format: str, opset: int) -> None:
    """Raises: ValueError: an unsupported opset, or a package is missing."""
    if opset not in OPSETS:
        raise ValueError(f"--opset must lie between {OPSETS[0]} and {OPSETS[-1]}, got {opset}")
    if format == "onnx":
        need(("onnx", "onnxscript", "onnxruntime"), "--format onnx")


def _write_onnx(captured: Captured, path: Path, opset: int) -> None:
    settings: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT], "opset_version": opset}
    settings |= {"dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(captured.program, (), str(path), **settings)
    onnx, _ = need(("onnx", "onnxscript"), "--format onnx")
    written = {entry.domain: entry.version for entry in onnx.load(str(path)).opset_import}[""]
    if written != opset:  # torch keeps the opset if it cannot convert it
        raise ValueError(f"it can only be written for opset {written}, not {opset}")
