"""Sliding-window inference: run a network that takes patches on a full image."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from monai.inferers import sliding_window_inference
from torch import Tensor

from medconv.data.augmentation.parameters import check_axes
from medconv.data.preprocessing.preprocess import left_right_axis
from medconv.inference.even_windows import even_window_inference
from medconv.inference.tta import swapped
from medconv.models.outputs import full_resolution

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlidingWindow:
    """Overlapping windows of the training patch's size, weighted by a Gaussian.

    Args:
        patch_size: voxels. overlap: share of a window, from 0 to below 1. batch_size: windows at once.
        mirror_axes: spatial axes of test-time augmentation: logits are the mean over all flips along them.
        slice_axis: the axis of a volume that a 2D network takes slice by slice, else None.
        flip_label_pairs: channels, such as of left and right kidney, that a left-right flip exchanges.
        even: windows as nnU-Net places and weights them.
    """

    patch_size: tuple[int, ...]
    overlap: float = 0.5
    batch_size: int = 4
    mirror_axes: tuple[int, ...] = ()
    slice_axis: int | None = None
    flip_label_pairs: tuple[tuple[int, int], ...] = ()
    even: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise ValueError(f"task.overlap must be at least 0 and below 1, got {self.overlap}")
        if type(self.batch_size) is not int or self.batch_size < 1:
            what = "a whole number of at least 1"
            raise ValueError(f"task.sw_batch_size must be {what}, got {self.batch_size}")
        check_axes("task.mirror_axes", self.mirror_axes, len(self.patch_size))

    def __call__(self, network: Callable[[Tensor], Any], image: Tensor) -> Tensor:
        """Shape: (1, channels, *spatial) -> logits (1, classes, *spatial)."""
        if self.slice_axis is None:
            return self._over_windows(network, image)
        # Slices become the batch, so that a forward pass takes windows of several slices.
        slices = image[0].movedim(1 + self.slice_axis, 0)
        return self._over_windows(network, slices).movedim(0, 1 + self.slice_axis)[None]

    def _over_windows(self, network: Callable[[Tensor], Any], images: Tensor) -> Tensor:
        """The sum of all windows, on the CPU if the GPU runs out of memory, with the same result."""
        try:
            return self._summed(network, images, images.device)
        except torch.OutOfMemoryError:  # of the GPU; the CPU raises another class
            torch.cuda.empty_cache()
        log.info("the logits of this image do not fit into GPU memory; summing them on the CPU")
        return self._summed(network, images, torch.device("cpu"))

    def _summed(self, network: Callable[[Tensor], Any], images: Tensor, device: torch.device) -> Tensor:
        windows, flipped = (self.patch_size, self.batch_size), partial(self._mean_over_flips, network)
        if self.even:
            return even_window_inference(images, *windows, flipped, self.overlap, device)
        logits = sliding_window_inference(
            images, *windows, flipped, overlap=self.overlap, mode="gaussian", device=device
        )
        assert isinstance(logits, Tensor)
        return logits

    def _mean_over_flips(self, network: Callable[[Tensor], Any], windows: Tensor) -> Tensor:
        total: Any = 0
        left_right = left_right_axis(self.slice_axis)
        for flips in product((False, True), repeat=len(self.mirror_axes)):
            dims = [2 + axis for axis, flip in zip(self.mirror_axes, flips, strict=True) if flip]
            logits = full_resolution(network(windows.flip(dims) if dims else windows)).flip(dims)
            if left_right is not None and 2 + left_right in dims:
                logits = swapped(logits, self.flip_label_pairs)
            total = total + logits
        mean: Tensor = total / 2 ** len(self.mirror_axes)
        return mean
