"""Networks as files of other formats, written: TorchScript, torch.export, ONNX, and a MONAI bundle."""

from medconv.exporting.bundle import write_bundle
from medconv.exporting.capture import Captured, capture
from medconv.exporting.describe import describe, in_words
from medconv.exporting.parity import on_case, on_patches
from medconv.exporting.writing import FORMATS, OPSETS, check_opset, read_written, write_network

__all__ = [
    "FORMATS",
    "OPSETS",
    "Captured",
    "capture",
    "check_opset",
    "describe",
    "in_words",
    "on_case",
    "on_patches",
    "read_written",
    "write_bundle",
    "write_network",
]
