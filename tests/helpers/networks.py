"""A small 2D U-Net, a training step of it, and such a step as work for `perf=autotune`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medconv.models.unet import UNet


def unet(norm: str = "batch") -> UNet:
    """The same weights at each call. Shape: (batch, 1, *even) -> (batch, 2, *even)."""
    torch.manual_seed(0)
    return UNet(2, 1, 2, (4, 8), (2,), norm=norm)


def step(network: nn.Module, optimizer: Any) -> None:
    """One optimizer step on random images."""
    optimizer.zero_grad()
    network(torch.rand(2, 1, 16, 16)).square().mean().backward()
    optimizer.step()
