"""Sliding-window inference: run a network that takes patches on a full image."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.data.augmentation.parameters import check_axes
from medconv.data.preprocessing.preprocess import left_right_axis
from medconv.inference.tta import swapped
from medconv.inference.window_placement import EVEN_DISTANCE, FIXED_DISTANCE, WindowPlacement
from medconv.models.outputs import full_resolution
from medconv.utils.errors import ArgumentError
from medconv.utils.progress import track

# `...` and a slice for each spatial axis.
Box = tuple[Any, ...]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlidingWindow:
    """Overlapping windows of the training patch's size, blended with Gaussian weights.

    Args:
        patch_size: of a window, in voxels.
        overlap: of neighbouring windows, as a share of a window, from 0 to below 1.
        batch_size: windows in one forward pass.
        mirror_axes: spatial axes of test-time augmentation: logits are the mean over all flips along them.
        slice_axis: the axis of a volume that a 2D network takes slice by slice, else None.
        flip_label_pairs: channels, such as of left and right kidney, that a left-right flip exchanges.
        even: windows are placed and weighted as in nnU-Net, not as in MONAI.
        progress: a bar counts the forward passes of an image.
    Raises:
        ValueError: overlap, batch_size or mirror_axes are out of range.
    """

    patch_size: tuple[int, ...]
    overlap: float = 0.5
    batch_size: int = 4
    mirror_axes: tuple[int, ...] = ()
    slice_axis: int | None = None
    flip_label_pairs: tuple[tuple[int, int], ...] = ()
    even: bool = False
    progress: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        check_overlap("overlap", self.overlap)
        check_batch_size("batch_size", self.batch_size)
        check_axes("mirror_axes", self.mirror_axes, len(self.patch_size))

    @torch.no_grad()
    def __call__(self, network: Callable[[Tensor], Any], image: Tensor) -> Tensor:
        """The logits of a whole image; on the CPU if they do not fit into GPU memory, with the same values.

        They have no gradients.

        Shape: (1, channels, *spatial) -> logits (1, classes, *spatial).
        """
        if self.slice_axis is None:
            return self._with_cpu_fallback(network, image)
        # Slices become the batch, so that a forward pass takes windows of several slices.
        slices = image[0].movedim(1 + self.slice_axis, 0)
        logits = self._with_cpu_fallback(network, slices)
        return logits.movedim(0, 1 + self.slice_axis)[None]

    def _with_cpu_fallback(
        self,
        network: Callable[[Tensor], Any],
        images: Tensor,
    ) -> Tensor:
        try:
            return self._blended(network, images, images.device)
        # The GPU's error; the CPU raises another class.
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        log.info("the logits of this image do not fit into GPU memory; summing them on the CPU")
        return self._blended(network, images, torch.device("cpu"))

    def _blended(
        self,
        network: Callable[[Tensor], Any],
        images: Tensor,
        device: torch.device,
    ) -> Tensor:
        """The weighted mean of the network's outputs over all windows; small images are padded with 0.

        Shape: (images, channels, *spatial) -> (images, classes, *spatial) on `device`.
        """
        placement = EVEN_DISTANCE if self.even else FIXED_DISTANCE
        padded, content = self._padded(images)
        boxes = self._boxes(padded.shape[2:], placement)
        # Image after image, so that a batch may hold windows of two slices.
        windows = list(product(range(len(images)), boxes))
        weights = placement.weights(self.patch_size, images.device)
        blend = _Blend(padded, weights, device)
        starts: Iterable[int] = range(0, len(windows), self.batch_size)
        if self.progress:
            starts = track(starts, "predicting")
        for first in starts:
            batch = windows[first : first + self.batch_size]
            patches = torch.cat([padded[image : image + 1][box] for image, box in batch])
            logits = self._mean_over_flips(network, patches)
            if placement.sums_in_fp32:
                logits = logits.float()
            blend.add(batch, logits)
            # Else they stay in memory beside the next batch's.
            del logits
        return blend.mean(boxes)[content]

    def _boxes(self, size: Sequence[int], placement: WindowPlacement) -> list[Box]:
        """All windows of an image of this size; along the last axis they change fastest."""
        sides: list[list[slice]] = []
        for length, window in zip(size, self.patch_size, strict=True):
            starts = placement.starts(length, window, self.overlap)
            sides.append([slice(start, start + window) for start in starts])
        return [(..., *box) for box in product(*sides)]

    def _padded(self, images: Tensor) -> tuple[Tensor, Box]:
        """Images of at least the window's size, and the box of the content in them."""
        # Before and after each axis, the last axis first, as `F.pad` takes them.
        pads: list[int] = []
        content: list[slice] = []
        for length, window in zip(images.shape[2:], self.patch_size, strict=True):
            missing = max(0, window - length)
            before = missing // 2
            pads = [before, missing - before, *pads]
            content.append(slice(before, before + length))
        padded = F.pad(images, pads) if any(pads) else images
        return padded, (..., *content)

    def _mean_over_flips(
        self,
        network: Callable[[Tensor], Any],
        windows: Tensor,
    ) -> Tensor:
        """The network's logits, returned as they are where nothing is flipped: they can be large."""
        logit_sum = full_resolution(network(windows))
        for flips in _nonempty_flips(self.mirror_axes):
            dims = [2 + axis for axis in flips]
            flipped_logits = full_resolution(network(windows.flip(dims)))
            logits = flipped_logits.flip(dims)
            if left_right_axis(self.slice_axis) in flips:
                logits = swapped(logits, self.flip_label_pairs)
            # `flip` has copied `logits`, so they may be overwritten; the first sum is the network's.
            logit_sum = logits.add_(logit_sum)
        if not self.mirror_axes:
            return logit_sum
        return logit_sum.div_(2 ** len(self.mirror_axes))


class _Blend:
    """The weighted sum of windows.

    Args:
        images: (images, channels, *spatial).
        weights: of a window's voxels, (*window_size).
        device: of the sum.
    """

    def __init__(self, images: Tensor, weights: Tensor, device: torch.device) -> None:
        self.images = images
        self.weights = weights
        self.device = device
        self.total = torch.empty(0)

    def add(self, windows: Sequence[tuple[int, Box]], logits: Tensor) -> None:
        """Args: windows: number of the image, and box in it. logits: (windows, classes, *window_size)."""
        if not self.total.numel():
            num_images, _, *size = self.images.shape
            self.weights = self.weights.to(torch.promote_types(logits.dtype, self.images.dtype))
            shape = (num_images, logits.shape[1], *size)
            self.total = torch.zeros(shape, dtype=self.weights.dtype, device=self.device)
        # In the logits' own precision, and apart from them: a network may return its input.
        weighted = torch.empty_like(logits[0])
        for (image, box), window_logits in zip(windows, logits, strict=True):
            torch.mul(window_logits, self.weights, out=weighted)
            self.total[image][box] += weighted.to(self.device)

    def mean(self, boxes: Sequence[Box]) -> Tensor:
        """The mean, in place of the sum. Args: boxes: all windows of an image."""
        count = torch.zeros_like(self.total[0, 0])
        weights = self.weights.to(self.device)
        for box in boxes:
            count[box] += weights
        return self.total.div_(count)


def check_overlap(name: str, overlap: float) -> None:
    """Args: name: of the argument. Raises: ArgumentError: not from 0 to below 1."""
    if not 0 <= overlap < 1:
        raise ArgumentError(name, f" must be at least 0 and below 1, got {overlap}")


def check_batch_size(name: str, batch_size: int) -> None:
    """Args: name: of the argument. Raises: ArgumentError: not a whole number of at least 1."""
    if type(batch_size) is not int or batch_size < 1:
        raise ArgumentError(name, f" must be a whole number of at least 1, got {batch_size}")


def _nonempty_flips(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sets of axes to flip along, in a fixed order: sums of floats depend on it."""
    for flipped in product((False, True), repeat=len(axes)):
        if any(flipped):
            yield tuple(axis for axis, flip in zip(axes, flipped, strict=True) if flip)
