"""The layers of the convolutions' benchmark, and the passes that are timed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.convs import (
    acs,
    ball,
    basis,
    bottleneck,
    channel_transform,
    masked,
    se,
    separable,
    smooth,
    spacing,
    transform,
)
from medconv.convs.parametrization import install
from medconv.features.equivariance.equivariant import GroupPrior
from medconv.features.equivariance.group import Group

LIBRARY = "nn.Conv"
TWO = "transform, two launches"
Run = Callable[[], Any]


class Unfolded(nn.Module):
    """The usual naive code for a convolution that torch lacks: patches, then a matrix product."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.size, self.padding = conv.weight, conv.kernel_size, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, [p for p in reversed(self.padding) for _ in range(2)])
        for axis, k in enumerate(self.size):
            x = x.unfold(2 + axis, k, 1)
        letters = "xyz"[: len(self.size)], "uvw"[: len(self.size)]
        return torch.einsum(f"bi{letters[0]}{letters[1]},oi{letters[1]}->bo{letters[0]}", x, self.weight)


class ThreePlanes(nn.Module):
    """`acs` as in its paper: three thin convolutions, concatenated."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        into, k = conv.in_channels, conv.kernel_size[0]
        outs = [len(part) for part in torch.arange(conv.out_channels).tensor_split(3)]
        sizes = [(k, k, 1), (k, 1, k), (1, k, k)]
        self.parts = nn.ModuleList(
            nn.Conv3d(into, out, size, padding="same", bias=False)
            for out, size in zip(outs, sizes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class _Forced(nn.Module):
    """`transform` in one of its two implementations, whatever the cost model says."""

    def __init__(self, conv: nn.Module, two: bool) -> None:
        super().__init__()
        self.conv, self.two = conv, two

    def forward(self, x: Tensor) -> Tensor:
        chosen = channel_transform.prefers_two_launches
        channel_transform.prefers_two_launches = lambda *_: self.two
        try:
            return self.conv(x)
        finally:
            channel_transform.prefers_two_launches = chosen


def layers(dims: int, channels: int, options: argparse.Namespace) -> dict[str, nn.Module]:
    conv_class = {2: nn.Conv2d, 3: nn.Conv3d}[dims]

    def conv() -> Any:
        return conv_class(channels, channels, 3, padding=1, bias=False)

    dense_bank = torch.randn(channels, channels, *[3] * dims)
    regular = install(conv(), GroupPrior((3,) * dims, Group(dims, (0,)), True, True), False)
    layers = {
        LIBRARY: conv(),
        "transform": transform(conv()),
        "transform, folded": _Forced(transform(conv()), False),
        TWO: _Forced(transform(conv()), True),
        "transform, dense bank": transform(conv(), bank=dense_bank),
        "transform, dense bank, folded": _Forced(transform(conv(), bank=dense_bank), False),
        "transform, dense bank, two launches": _Forced(transform(conv(), bank=dense_bank), True),
        "basis": basis(conv()),
        "ball": ball(conv()),
        "spacing": spacing(conv(), spacing_mm=(1.0,) * dims),
        "smooth": smooth(conv()),
        "smooth, throughout": smooth(conv(), throughout=True),
        "masked": masked(conv()),
        "mirror": regular,
        "se": se(conv()),
        "bottleneck": bottleneck(conv()),
        "separable": separable(conv()),
        "unfold and einsum": Unfolded(conv()),
    }
    if dims == 3:
        layers |= {"acs": acs(conv()), "acs, three convolutions": ThreePlanes(conv())}
    layers = {name: layer for name, layer in layers.items() if name in {LIBRARY, *(options.layers or layers)}}
    for layer in layers.values():
        layer.to(options.device, memory_format=layout(dims))
    return layers


def layout(dims: int) -> torch.memory_format:
    return torch.channels_last if dims == 2 else torch.channels_last_3d


def image(
    options: argparse.Namespace, batch: int, channels: int, size: Sequence[int], needs_grad: bool = False
) -> Tensor:
    x = torch.randn(batch, channels, *size, device=options.device, dtype=getattr(torch, options.dtype))
    return x.contiguous(memory_format=layout(len(size))).requires_grad_(needs_grad)


def autocast(options: argparse.Namespace) -> torch.autocast:
    return torch.autocast(options.device, getattr(torch, options.dtype), enabled=options.dtype != "float32")


def forward(layer: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    def once() -> None:
        with torch.no_grad(), autocast(options):
            layer(x)

    return once


def _step(layer: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    with torch.no_grad(), autocast(options):
        grad = torch.randn_like(layer(x))
    leaves = [x, *layer.parameters()]

    def once() -> None:
        with autocast(options):
            output = layer(x)
        torch.autograd.grad(output, leaves, grad)

    return once


def _update(layer: nn.Module, x: Tensor, options: argparse.Namespace) -> Run:
    """A training step: forward, backward, and the optimizer's update."""
    with torch.no_grad(), autocast(options):
        grad = torch.randn_like(layer(x))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-6)

    def once() -> None:
        with autocast(options):
            output = layer(x)
        output.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return once


PASSES = {"forward": forward, "forward and backward": _step, "training step": _update}
