"""Arrays of the store in chunks that blosc2 compresses: reading a patch decompresses the chunks it touches.

blosc2 runs in the calling thread alone: loader workers are processes, and cases are prepared in threads.
"""

import mmap
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from medconv.utils.optional_imports import needed

# Voxels along an axis of a chunk, which has an index entry, and of its blocks, which are decompressed
_VOLUME = (64, 32)
_PLANE = (512, 128)  # of pictures, and of slices


@cache
def blosc2() -> Any:
    """The package. Raises: ValueError: it is not installed."""
    package = needed("blosc2", "blosc2", "data.store=blosc2")
    package.set_nthreads(1)
    return package


@dataclass(frozen=True)
class Compression:
    """How arrays are compressed.

    Args:
        slice_axis: across the slices that patches are, each with chunks of its own; None: patches have all
            axes.
    """

    slice_axis: int | None = None

    def compressed(self, values: np.ndarray, spatial_dims: int) -> bytes:
        """Args: values: (*any, *spatial). spatial_dims: the number of spatial axes."""
        edges = [_VOLUME if spatial_dims == 3 and self.slice_axis is None else _PLANE] * spatial_dims
        if self.slice_axis is not None:
            edges[self.slice_axis] = (1, 1)
        channel_edges = [(1, 1)] * (values.ndim - spatial_dims)
        chunks, blocks = (
            tuple(min(edge, length) for edge, length in zip(of_axes, values.shape, strict=True))
            for of_axes in zip(*channel_edges, *edges, strict=True)
        )
        package = blosc2()
        parameters = package.CParams(
            codec=package.Codec.ZSTD, clevel=1, filters=[package.Filter.SHUFFLE], nthreads=1
        )
        array = package.asarray(values, chunks=chunks, blocks=blocks, cparams=parameters)
        return array.to_cframe()  # type: ignore[no-any-return]


class CompressedArray:
    """A read-only array in a mapped file; indexing it decompresses what is asked for, as a NumPy array.

    Args:
        pages: of the file.
        name: of the file, for errors.
    Raises:
        ValueError: the file holds no such array, or is damaged.
    """

    def __init__(
        self, pages: mmap.mmap, name: str, shape: tuple[int, ...], dtype: np.dtype, array: Any = None
    ) -> None:
        if array is None:
            try:
                array = blosc2().ndarray_from_cframe(pages, copy=False)
            except Exception as error:  # of damage: RuntimeError, TypeError, SyntaxError of a type, ...
                raise ValueError(f"{name} is not as it was written") from error
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"the record does not describe {name}")
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)
        self.size = prod(shape)
        self.itemsize = dtype.itemsize
        self.nbytes = self.size * self.itemsize
        self._array = array
        self._pages = pages  # the array lies in them
        self._name = name

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if index is None:  # one axis more, as of NumPy; reads nothing
            expanded = blosc2().expand_dims(self._array, 0)
            return CompressedArray(self._pages, self._name, (1, *self.shape), self.dtype, expanded)
        try:
            return self._array[index]
        except RuntimeError as error:
            raise ValueError(f"{self._name} is damaged and cannot be decompressed: {error}") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a compressed array is copied when it is read")
        return np.asarray(self[...], dtype)
