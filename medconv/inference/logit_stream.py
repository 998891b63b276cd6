"""The logits of an image, plane after plane: in memory are only the planes that windows still add to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_VALUES_AT_ONCE = 2**22  # of a window's logits that are weighted; all of 105 classes in 64^3 are 110 MB


class LogitSource(Protocol):
    """Logits of an image along one axis, whose planes are asked for in order."""

    def take(self, first: int, stop: int) -> Tensor:
        """The planes from `first` to `stop`; those before `first` are never asked for again.

        Shape: (classes, stop - first, *in_plane), float32 or float64.
        """


@dataclass(frozen=True)
class Window:
    """Where a window lies.

    Args:
        box: in its planes.
        constant: the value of each channel, if all voxels have it.
    """

    first_plane: int
    box: tuple[slice, ...]
    constant: tuple[float, ...] | None = None


class LogitStream:
    """The mean of overlapping windows' logits, weighted, along one axis of the image.

    A ring holds the planes from the first that may be asked for to the last of the windows at hand, so
    memory does not grow with the length of the axis. If the sum does not fit into a GPU, it goes on in the
    computer's memory.

    Args:
        windows: ordered by their first plane.
        network: takes some of the windows to their logits, each (classes, depth, *in_plane).
        weights: of a window's voxels, (depth, *in_plane).
        shape: of the padded image, planes first: (length, *in_plane).
        content: the box of the image in its padding, planes first.
        batch_size: windows in one call of the network.
        planes_at_once: at most so many planes are taken at once; None: all of them.
        device: of the sum.
        track: wraps the batches, such as with a progress bar.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        network: Callable[[Sequence[Window]], Sequence[Tensor]],
        weights: Tensor,
        shape: Sequence[int],
        content: Sequence[slice],
        *,
        batch_size: int,
        planes_at_once: int | None,
        device: torch.device,
        track: Callable[[Iterable[Sequence[Window]]], Iterable[Sequence[Window]]] = iter,
    ) -> None:
        planes, *self._in_plane = content
        self._offset = planes.start
        self.length = planes.stop - planes.start
        self._network = network
        self._weights = weights
        self._shape = tuple(shape)
        self._device = device
        batches = [windows[first : first + batch_size] for first in range(0, len(windows), batch_size)]
        self._batches = iter(track(batches))
        # After each batch, the planes before the next batch's first one are complete.
        first_planes = [*(batch[0].first_plane for batch in batches), shape[0]]
        self._complete_after = iter(first_planes[1:])
        spans = [
            batch[-1].first_plane + len(weights) - first
            for batch, (first, _) in zip(batches, pairwise(first_planes), strict=True)
        ]
        self._capacity = min(shape[0], max(spans) + (planes_at_once or shape[0]))
        self._first = 0  # plane in the ring
        self._complete = 0  # planes before this one have all their windows
        self._sum = torch.empty(0)
        self._weight_sum = torch.empty(0)
        self._weighted = torch.empty(0)

    @property
    def num_values(self) -> int:
        """Values of the ring per class."""
        return self._capacity * prod(self._shape[1:])

    def take(self, first: int, stop: int) -> Tensor:
        first += self._offset
        stop += self._offset
        self._free(first)
        while self._complete < stop:
            self._advance()
        pieces = [self._sum[:, planes] for planes, _ in self._pieces(first, stop)]
        logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        return logits[:, :, *self._in_plane]

    def _free(self, first: int) -> None:
        """Planes before this one make place for others, whose sums begin at 0."""
        if first > self._first and self._sum.numel():
            for planes, _ in self._pieces(self._first, min(first, self._first + self._capacity)):
                self._sum[:, planes] = 0
                self._weight_sum[planes] = 0
        self._first = max(first, self._first)

    def _advance(self) -> None:
        """The next batch of windows."""
        batch = next(self._batches)
        for window, logits in zip(batch, self._logits(batch), strict=True):
            self._add(window, logits)
        complete = next(self._complete_after)
        for planes, _ in self._pieces(self._complete, complete):
            self._sum[:, planes] /= self._weight_sum[planes]
        self._complete = complete

    def _logits(self, batch: Sequence[Window]) -> list[Tensor]:
        """Of each window, on the ring's device."""
        try:
            return self._on_device(self._network(batch))
        # The GPU's error; the CPU raises another class.
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        if self._device.type != "cpu":
            log.info("the logits of this image do not fit into GPU memory; summing them on the CPU")
        self._device = torch.device("cpu")
        if self._sum.numel():
            self._sum = self._sum.cpu()
            self._weight_sum = self._weight_sum.cpu()
            self._weights = self._weights.cpu()
        return self._on_device(self._network(batch))

    def _on_device(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """The first ones say how large the ring is."""
        if not self._sum.numel():
            # Half-precision logits are weighted in their own precision, as MONAI does, and summed in fp32.
            dtype = torch.promote_types(logits[0].dtype, torch.float32)
            ring = (self._capacity, *self._shape[1:])
            self._sum = torch.zeros((len(logits[0]), *ring), dtype=dtype, device=self._device)
            self._weight_sum = torch.zeros(ring, dtype=dtype, device=self._device)
            self._weights = self._weights.to(self._device, dtype)
            # Of some classes, apart from the logits: a network may return its input. One for all windows,
            # since fresh memory costs more than the multiplication.
            classes_at_once = max(1, _VALUES_AT_ONCE // logits[0][0].numel())
            weighted_shape = (min(classes_at_once, len(logits[0])), *logits[0].shape[1:])
            self._weighted = torch.empty(weighted_shape, dtype=logits[0].dtype)
        self._weighted = self._weighted.to(self._device)
        return [each.to(self._device) for each in logits]

    def _add(self, window: Window, logits: Tensor) -> None:
        """Shape: logits (classes, depth, *in_plane)."""
        last = window.first_plane + len(self._weights)
        pieces = list(self._pieces(window.first_plane, last))
        classes_at_once = len(self._weighted)
        for first in range(0, len(logits), classes_at_once):
            some_logits = logits[first : first + classes_at_once]
            weighted = torch.mul(some_logits, self._weights, out=self._weighted[: len(some_logits)])
            some_sums = self._sum[first : first + classes_at_once]
            for planes, part in pieces:
                some_sums[:, planes][:, :, *window.box] += weighted[:, part]
        for planes, part in pieces:
            self._weight_sum[planes][:, *window.box] += self._weights[part]

    def _pieces(self, first: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Planes as slices of the ring, which they may wrap around, and their slices among these planes."""
        while first < stop:
            begin = first % self._capacity
            count = min(stop - first, self._capacity - begin)
            yield slice(begin, begin + count), slice(-(stop - first), count - (stop - first) or None)
            first += count


@dataclass
class WholeLogits:
    """Logits that are in memory already. Args: logits: (classes, length, *in_plane)."""

    logits: Tensor

    def take(self, first: int, stop: int) -> Tensor:
        return self.logits[:, first:stop]

    def channels(self, planes: slice) -> Sequence[Tensor]:
        """Each (planes, *in_plane)."""
        return self.logits[:, planes].unbind()
