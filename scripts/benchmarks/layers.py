"""Norms, depthwise convolutions and the loss against the library's own: forward and backward.

Layers over the stages of a U-Net, the loss over numbers of classes. Of kernels that a CPU with AMX computes
badly, the gradient; of transposed convolutions, all gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from monai.losses import DiceCELoss
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.results import Row, conditions, table
from medconv.convs.parametrization import CHANNELS_LAST
from medconv.features.diagnosis.alternating import alternate
from medconv.models.layers.depthwise import block_weight
from medconv.models.layers.fast_norm import ChannelsLastBatchNorm3d, instance_norm
from medconv.performance.kernel_gradients import convolution_backward
from medconv.training.losses.segmentation import DiceCrossEntropy

PARTS = ("norm", "depthwise", "loss", "kernel", "upsampling")
STAGES = [(32, (40, 56, 40)), (64, (20, 28, 20)), (128, (10, 14, 10)), (256, (5, 7, 5))]
CLASSES = [(3, (40, 56, 40)), (20, (64, 64, 64)), (105, (64, 64, 64))]
# Channels, kernel and size of layers: the stages of hearts in thick slices, and the coarsest of pictures
KERNELS = [
    (24, (3, 3, 1), (112, 128, 10)),
    (48, (3, 3, 1), (56, 64, 10)),
    (96, (3, 3, 3), (28, 32, 10)),
    (192, (3, 3, 3), (8, 8, 5)),
    (256, (3, 3), (8, 8)),
]
# Channels in and out, kernel and stride, and size before: the finest of left atria, hearts and pictures
UPSAMPLING = [
    (32, 16, (2, 2, 2), (48, 32, 20)),
    (48, 24, (2, 2, 1), (56, 64, 10)),
    (48, 24, (2, 2), (128, 128)),
]
_LAST = torch.channels_last_3d


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--scale", type=int, default=1, help="of every spatial axis; 3 is about 128^3")


def run(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for part in options.parts:
        if part == "kernel":
            for channels, kernel, size in KERNELS:
                rows += _kernel_rows((options.batch, channels, *size), kernel, options.pairs)
        elif part == "upsampling":
            for channels, out_channels, kernel, size in UPSAMPLING:
                rows += _upsampling_rows(
                    (options.batch, channels, *size), out_channels, kernel, options.pairs
                )
        else:
            for channels, size in CLASSES if part == "loss" else STAGES:
                shape = (options.batch, channels, *(options.scale * n for n in size))
                rows += _rows(part, shape, options.pairs)
    return rows


def _rows(part: str, shape: tuple[int, ...], pairs: int) -> list[Row]:
    """Args: shape: (batch, channels or classes, *spatial)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    variants = {"norm": _norms, "depthwise": _depthwise, "loss": _losses}[part](x)
    unit = "classes" if part == "loss" else "channels"
    calls = 10 if device.type == "cuda" else 1
    return _timed(part, f"{shape[1]} {unit}", shape, variants, pairs, calls)


def _kernel_rows(shape: tuple[int, ...], kernel: tuple[int, ...], pairs: int) -> list[Row]:
    """Args: shape: (batch, channels, *spatial)."""
    _, channels, *size = shape
    ones, zeros = [1] * len(size), [0] * len(size)
    padding = [edge // 2 for edge in kernel]
    settings = (None, ones, padding, ones, False, zeros, 1, [False, True, False])
    layer = f"{channels} channels, kernel {'x'.join(map(str, kernel))}"
    return _gradient_rows("kernel", layer, shape, shape, (channels, channels, *kernel), settings, pairs)


def _upsampling_rows(
    shape: tuple[int, ...], out_channels: int, kernel: tuple[int, ...], pairs: int
) -> list[Row]:
    """Args: shape: (batch, channels, *spatial)."""
    batch, channels, *size = shape
    ones, zeros = [1] * len(size), [0] * len(size)
    settings = ([out_channels], list(kernel), zeros, ones, True, zeros, 1, [True, True, True])
    output = (batch, out_channels, *(n * factor for n, factor in zip(size, kernel, strict=True)))
    layer = f"{channels} to {out_channels} channels, stride {'x'.join(map(str, kernel))}"
    return _gradient_rows(
        "upsampling", layer, shape, output, (channels, out_channels, *kernel), settings, pairs
    )


def _gradient_rows(
    part: str,
    layer: str,
    shape: tuple[int, ...],
    output: tuple[int, ...],
    weight: tuple[int, ...],
    settings: tuple[Any, ...],
    pairs: int,
) -> list[Row]:
    """Args: shape, output, weight: shapes of tensors; settings: as of `convolution_backward`."""
    layout = CHANNELS_LAST[len(shape)]
    tensors = [
        torch.randn(each, dtype=torch.bfloat16).contiguous(memory_format=layout)
        for each in (output, shape, weight)
    ]
    library = torch.ops.aten.convolution_backward
    variants = {
        "torch": lambda: library(*tensors, *settings),
        "ours": lambda: convolution_backward(library, *tensors, *settings),
    }
    return _timed(part, layer, shape, variants, pairs)


def _timed(
    part: str,
    layer: str,
    shape: tuple[int, ...],
    variants: Mapping[str, Callable[[], Any]],
    pairs: int,
    calls: int = 1,
) -> list[Row]:
    """A row for each variant, beside the first one. Args: calls: as of `alternate`."""
    reference = next(iter(variants))
    case = f"{layer} at {'x'.join(map(str, shape[2:]))}, batch {shape[0]}, bf16"
    kind = {"benchmark": part, "case": case, "reference": reference}
    timed = alternate(variants, reference, pairs, calls=calls)
    return [{**kind, "variant": name, **values, **conditions()} for name, values in timed.items()]


def show(rows: Sequence[Row]) -> str:
    return table(rows, ("benchmark", "case", "variant", "seconds", "ratio", "spread"))


def _norms(x: Tensor) -> dict[str, Callable[[], Any]]:
    """Each followed by a leaky ReLU and a conversion to channels-last, for the next convolution."""
    weight, bias = torch.ones(2, x.shape[1], device=x.device).unbind()
    last = x.contiguous(memory_format=_LAST)

    def library(y: Tensor, layout: torch.memory_format) -> Tensor:
        z = F.leaky_relu(F.instance_norm(y, weight=weight, bias=bias), 0.01, True)
        return z.contiguous(memory_format=layout)

    def batch(y: Tensor) -> Tensor:
        return F.leaky_relu(library_batch(y), 0.01, True)

    library_batch = nn.BatchNorm3d(x.shape[1], device=x.device)
    our_batch = ChannelsLastBatchNorm3d(x.shape[1], device=x.device)
    our_batch.negative_slope = 0.01
    return {
        "nn.InstanceNorm3d, channels-last": _both(lambda y: library(y, _LAST), last),
        "nn.InstanceNorm3d, contiguous": _both(lambda y: library(y, torch.contiguous_format), x),
        "ours, channels-last": _both(lambda y: instance_norm(y, weight, bias, 1e-5, 0.01), last),
        "nn.BatchNorm3d, channels-last": _both(batch, last),
        "our batch norm, channels-last": _both(our_batch, last),
    }


def _depthwise(x: Tensor) -> dict[str, Callable[[], Any]]:
    channels = x.shape[1]
    last, weight = x.contiguous(memory_format=_LAST), torch.randn(channels, 1, 3, 3, 3, device=x.device)
    dense = torch.randn(channels, channels, 3, 3, 3, device=x.device).contiguous(memory_format=_LAST)

    def grouped(y: Tensor, size: int) -> Tensor:
        return F.conv3d(
            y, block_weight(weight, channels, size).to(y.dtype), padding=1, groups=channels // size
        )

    def library(y: Tensor) -> Tensor:
        return F.conv3d(y, weight.to(y.dtype), padding=1, groups=channels)

    weight.requires_grad_(), dense.requires_grad_()
    return {
        "nn.Conv3d, depthwise, channels-last": _both(library, last),
        "nn.Conv3d, depthwise, contiguous": _both(library, x),
        "nn.Conv3d, depthwise, channels-last, fp32": _both(library, last.float()),
        **{f"ours, blocks of {n}": _both(lambda y, n=n: grouped(y, n), last) for n in (8, 16, 32)},  # type: ignore[misc]
        "nn.Conv3d, dense": _both(lambda y: F.conv3d(y, dense.to(y.dtype), padding=1), last),
    }


def _losses(logits: Tensor) -> dict[str, Callable[[], Any]]:
    """Cross-entropy plus soft Dice; MONAI's with the same settings."""
    classes = logits.shape[1]
    reference = torch.randint(classes, (len(logits), 1, *logits.shape[2:]), device=logits.device)
    monais = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    ours = DiceCrossEntropy()
    return {
        "MONAI's DiceCELoss": _both(lambda y: monais(y.float(), reference), logits),
        "ours": _both(lambda y: ours(y, reference), logits),
    }


def _both(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    """Forward and backward, to the input and to the weights that want it."""
    leaf = nn.Parameter(x.detach())
    with torch.no_grad():
        grad = torch.randn_like(function(leaf))

    def step() -> None:
        leaf.grad = None
        function(leaf).backward(grad)

    return step
