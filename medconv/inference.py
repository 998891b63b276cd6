"""Whole images through a network that takes patches; used by validation and prediction alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monai.inferers import sliding_window_inference
from torch import Tensor

from medconv.networks.outputs import full_resolution


@dataclass(frozen=True)
class SlidingWindow:
    """Windows of the training patch's size, overlapping, weighted by a Gaussian.

    Args: patch_size: voxels. overlap: share of a window, from 0 to below 1. batch_size: windows per forward.
    """

    patch_size: tuple[int, ...]
    overlap: float = 0.5
    batch_size: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise ValueError(f"task.overlap must lie between 0 and 1 (exclusive), got {self.overlap}")
        if self.batch_size < 1:
            raise ValueError(f"task.window_batch_size must be at least 1, got {self.batch_size}")

    def __call__(self, network: Callable[[Tensor], Any], image: Tensor) -> Tensor:
        """Shape: (1, channels, *spatial) -> logits (1, classes, *spatial)."""
        logits = sliding_window_inference(
            image,
            self.patch_size,
            self.batch_size,
            lambda windows: full_resolution(network(windows)),
            overlap=self.overlap,
            mode="gaussian",
        )
        assert isinstance(logits, Tensor)
        return logits
