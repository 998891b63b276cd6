"""A checkpoint's network beside its exported files: seconds for a batch of windows, in fp32, and how far
logits differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import results
from medconv.features.diagnosis.alternating import alternate
from medconv.features.export.formats import read_written, write_network
from medconv.features.export.graph import capture
from medconv.features.export.job import OPSETS
from medconv.inference.load import LoadedModel, load
from medconv.models.outputs import full_resolution

REFERENCE = "PyTorch, as predict runs it"
_FORMATS = ("torchscript", "onnx", "pt2")
_SHOWN = ["case", "variant", "seconds", "ratio", "spread", "difference", "megabytes"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", choices=_FORMATS, help="default: all of the device")
    parser.add_argument("--batch", type=int, help="windows in a forward pass; as validated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=15, help="rounds of all variants in turn")


@torch.no_grad()
def run(options: argparse.Namespace) -> list[results.Row]:
    """`difference` is the largest one to the reference's logits.

    Raises: ValueError: ONNX on a device: its runtime computes on a CPU here.
    """
    device = options.device
    formats = options.formats or [name for name in _FORMATS if device == "cpu" or name != "onnx"]
    if device != "cpu" and "onnx" in formats:
        raise ValueError(f"--formats onnx needs --device cpu, got {device}")
    fast, plain = load(options.checkpoint, device=device), load(options.checkpoint, plain=True)
    patch, batch = plain.window.patch_size, options.batch or plain.window.batch_size
    image = torch.randn(batch, len(plain.modalities), *patch, generator=torch.Generator().manual_seed(0))
    image = image.to(device)
    calls: dict[str, Callable[[], Tensor]] = {
        REFERENCE: partial(_forward, fast.network, image.contiguous(memory_format=fast.memory_format))
    }
    sizes: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for name, network, size in _files(plain, formats, Path(folder)):
            calls[name], sizes[name] = partial(_forward, network.to(device), image), size
        calls["PyTorch, plain modules"] = partial(_forward, plain.network.to(device), image)
        expected = calls[REFERENCE]()
        differences = {name: float((call() - expected).abs().max()) for name, call in calls.items()}
        timed = alternate(calls, REFERENCE, options.pairs)
    case = f"{type(plain.network).__name__}, {results.by(patch)} voxels, batch {batch}"
    kind = {
        "benchmark": "export",
        "case": case,
        "reference": REFERENCE,
        **results.conditions(options.device),
        "device": device,
    }
    return [
        {
            **kind,
            "variant": name,
            **timed[name],
            "difference": differences[name],
            "megabytes": sizes.get(name),
        }
        for name in calls
    ]


def show(rows: Sequence[results.Row]) -> str:
    return results.table(rows, _SHOWN)


def _files(plain: LoadedModel, formats: Sequence[str], folder: Path) -> list[tuple[str, nn.Module, float]]:
    captured, files = capture(plain), []
    for name in formats:
        path = folder / name
        write_network(captured, name, path, OPSETS[0])
        network = read_written(path, name)
        files.append(
            (
                f"{name}, by {'ONNX runtime' if name == 'onnx' else 'PyTorch'}",
                network,
                path.stat().st_size / 1e6,
            )
        )
    return files


def _forward(network: Callable[[Tensor], Any], image: Tensor) -> Tensor:
    return full_resolution(network(image))
