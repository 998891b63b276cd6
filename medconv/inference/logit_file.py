"""Logits of a case in a file, where its probabilities are wanted: in memory they would be large."""

import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor


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
        return planes_before * prod(self.in_plane) * self._dtype.itemsize


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
