"""The logits of an image, plane after plane: in memory are only the planes that windows still add to."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)
_VALUES_AT_ONCE = 2**22  # of a window's logits that are weighted; all of 105 classes in 64^3 are 110 MB
_HALF_ABOVE = 2**30  # bytes of the planes in fp32; more have fp16, where only labels follow from them


class LogitSource(Protocol):
    """Logits of an image along one axis, whose planes are asked for in order."""

    def take(self, first: int, stop: int) -> Tensor:
        """The planes from `first` to `stop`; those before `first` are never asked for again.

        They may lie in memory that the next call changes.
        Shape: (classes, stop - first, *in_plane), float16, float32 or float64.
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

    In memory are the planes from the first that may be asked for to the last of the windows at hand, so it
    does not grow with the length of the axis. They are no ring: planes that are asked for would wrap around
    it, and be copied. If they do not fit into a GPU, they go on in the computer's memory.

    They are weighted sums, divided in the end, in fp32. In fp16 they are the mean of the windows so far: it
    has the size of logits, where sums may overflow, and products with a corner's small weights lose digits.
    Once a logit exceeds the range of fp16, the mean goes on in fp32: clipped, classes would be equal.

    Args:
        windows: ordered by their first plane.
        network: takes some of the windows to their logits, each (classes, depth, *in_plane).
        weights: of a window's voxels, (depth, *in_plane).
        shape: of the padded image, planes first: (length, *in_plane).
        content: the box of the image in its padding, planes first.
        batch_size: windows in one call of the network.
        planes_at_once: at most so many planes are taken at once; None: all of them.
        only_labels: only label maps follow from the logits, which may have fp16 where fp32 takes much memory.
        device: of the planes.
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
        only_labels: bool,
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
        # When the next windows are added, at least one of the planes that are asked for is theirs.
        self._capacity = min(shape[0], max(spans) + (planes_at_once or shape[0]) - 1)
        self._start = 0  # first plane in memory
        self._first = 0  # first plane that may be asked for
        self._complete = 0  # planes before this one have all their windows
        self._only_labels = only_labels
        self._is_mean = False  # `_sum` is the mean of the windows so far
        self._sum = torch.empty(0)
        self._weight_sum = torch.empty(0)
        self._weighted = torch.empty(0)

    @property
    def num_values(self) -> int:
        """Values of the planes in memory, per class."""
        return self._capacity * prod(self._shape[1:])

    def take(self, first: int, stop: int) -> Tensor:
        self._first = first + self._offset
        while self._complete < stop + self._offset:
            self._advance()
        planes = self._planes(first + self._offset, stop + self._offset)
        return self._sum[:, planes][:, :, *self._in_plane]

    def _advance(self) -> None:
        """The next batch of windows."""
        batch = next(self._batches)
        all_logits = self._logits(batch)
        self._make_room(batch[-1].first_plane + len(self._weights))
        for window, logits in zip(batch, all_logits, strict=True):
            self._add(window, logits)
        complete = next(self._complete_after)
        if not self._is_mean:
            planes = self._planes(self._complete, complete)
            self._sum[:, planes] /= self._weight_sum[:, planes]
        self._complete = complete

    def _make_room(self, stop: int) -> None:
        """For planes before `stop`; those that are not asked for again give way."""
        if stop - self._start <= self._capacity:
            return
        start = min(self._first, self._complete)
        for planes in (self._sum, self._weight_sum):
            _drop(planes, start - self._start)
        self._start = start

    def _logits(self, batch: Sequence[Window]) -> list[Tensor]:
        """Of each window, on the device of the planes."""
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
        """The first ones say how large the planes are."""
        if not self._sum.numel():
            # Half-precision logits are weighted in their own precision, as MONAI does, and summed in fp32.
            dtype = torch.promote_types(logits[0].dtype, torch.float32)
            self._weights = self._weights.to(self._device, dtype)
            planes = (self._capacity, *self._shape[1:])
            self._weight_sum = torch.zeros((1, *planes), dtype=dtype, device=self._device)
            self._is_mean = self._only_labels and takes_half(len(logits[0]), self.num_values)
            if self._is_mean and _fit_half(logits):
                dtype = torch.float16
            self._sum = torch.zeros((len(logits[0]), *planes), dtype=dtype, device=self._device)
            # Of some classes, apart from the logits: a network may return its input. One for all windows,
            # since fresh memory costs more than the multiplication.
            classes_at_once = max(1, _VALUES_AT_ONCE // logits[0][0].numel())
            weighted_shape = (min(classes_at_once, len(logits[0])), *logits[0].shape[1:])
            self._weighted = torch.empty(weighted_shape, dtype=dtype if self._is_mean else logits[0].dtype)
        elif self._sum.dtype == torch.float16 and not _fit_half(logits):
            log.info(
                "logits beyond the range of fp16: their planes go on in fp32, and take %.1f GB, not %.1f",
                4 * self._sum.numel() / 2**30,
                2 * self._sum.numel() / 2**30,
            )
            self._sum = self._sum.float()
            self._weighted = self._weighted.float()
        self._weighted = self._weighted.to(self._device)
        return [each.to(self._device) for each in logits]

    def _add(self, window: Window, logits: Tensor) -> None:
        """Shape: logits (classes, depth, *in_plane)."""
        planes = self._planes(window.first_plane, window.first_plane + len(self._weights))
        box = (slice(None), planes, *window.box)
        self._weight_sum[box] += self._weights
        share = (self._weights / self._weight_sum[box]).to(self._sum.dtype) if self._is_mean else None
        classes_at_once = len(self._weighted)
        for first in range(0, len(logits), classes_at_once):
            some_logits = logits[first : first + classes_at_once]
            some_sums = self._sum[first : first + classes_at_once][box]
            weighted = self._weighted[: len(some_logits)]
            if share is not None:
                some_sums.lerp_(weighted.copy_(some_logits), share)
            else:
                some_sums += torch.mul(some_logits, self._weights, out=weighted)

    def _planes(self, first: int, stop: int) -> slice:
        """Planes of the image as a slice of those in memory."""
        return slice(first - self._start, stop - self._start)


def takes_half(classes: int, values: float) -> bool:
    """Whether the mean of so many values per class has fp16 where only labels follow from it."""
    return 4 * classes * values > _HALF_ABOVE


def _fit_half(logits: Sequence[Tensor]) -> bool:
    """Whether logits that are finite are so in fp16."""
    ends = torch.stack([torch.stack(each.aminmax()) for each in logits])
    return not torch.finfo(torch.float16).max < float(ends.abs().max()) < inf


def _drop(planes: Tensor, count: int) -> None:
    """The first planes give way to those behind them, and as many of zeros follow.

    Shape: planes (classes, planes, *in_plane).
    """
    length = planes.shape[1]
    for first in range(0, length - count, count):
        # No more than `count` at once, so that none is overwritten before it is moved.
        target = planes[:, first : min(first + count, length - count)]
        target.copy_(planes[:, first + count : first + count + target.shape[1]])
    planes[:, length - count :] = 0


@dataclass
class WholeLogits:
    """Logits that are in memory already. Args: logits: (classes, length, *in_plane)."""

    logits: Tensor

    def take(self, first: int, stop: int) -> Tensor:
        return self.logits[:, first:stop]

    def channels(self, planes: slice) -> Sequence[Tensor]:
        """Each (planes, *in_plane)."""
        return self.logits[:, planes].unbind()


class LogitFile:
    """Planes of logits, written in order and read channel by channel.

    The file has no name, so the system frees it when the process ends, even if it is killed. It is read and
    written, not mapped into memory: mapped pages count as the process's memory, and a full disk would end it.

    Args:
        num_planes: of the image.
        folder: on a disk with room for all logits.
    Raises:
        OSError: no file can be made there, or the disk is full.
    """

    def __init__(self, num_planes: int, folder: Path) -> None:
        # Closed with this object, which outlives the prediction until its results are written.
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._num_planes = num_planes
        self._written = 0  # planes before this one
        self._dtype = np.dtype(np.float32)
        self.num_channels = 0
        self.in_plane: tuple[int, ...] = ()

    def put(self, first: int, logits: Tensor) -> None:
        """Write the planes from `first`; those that are there are left out.

        Shape: logits (channels, planes, *in_plane).
        """
        start = max(first, self._written)
        planes = logits[:, start - first :].cpu().numpy()
        self.num_channels, _, *in_plane = planes.shape
        self.in_plane = tuple(in_plane)
        self._dtype = planes.dtype
        for index, channel in enumerate(planes):
            self._file.seek(self._position(index, start))
            self._file.write(np.ascontiguousarray(channel).data)
        # So that a full disk is an error here.
        self._file.flush()
        self._written = first + logits.shape[1]

    def read(self, index: int, planes: slice) -> Tensor:
        """A channel. Shape: -> (planes, *in_plane)."""
        channel = np.empty((planes.stop - planes.start, *self.in_plane), self._dtype)
        self._file.seek(self._position(index, planes.start))
        self._file.readinto(channel.data)
        return torch.from_numpy(channel)

    def channels(self, planes: slice) -> Sequence[Tensor]:
        """Each (planes, *in_plane); in memory is only the one at hand."""
        return _Channels(self, planes)

    def _position(self, index: int, plane: int) -> int:
        """In bytes."""
        planes_before = index * self._num_planes + plane
        return planes_before * math.prod(self.in_plane) * self._dtype.itemsize


class _Channels(Sequence[Tensor]):
    """The channels of some planes, read as they are asked for."""

    def __init__(self, logits: LogitFile, planes: slice) -> None:
        self._logits = logits
        self._planes = planes

    def __len__(self) -> int:
        return self._logits.num_channels

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if index >= len(self):
            raise IndexError(index)
        return self._logits.read(index, self._planes)
