"""Formats for the store of prepared cases: size on disk, seconds to write, and one patch out of a volume,
hot and cold.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.datasets import volume
from benchmarks.results import Row, by, conditions
from medconv.features.diagnosis.alternating import compared

REFERENCE = "npy float32"
_BLOCK, _CHUNK = 32, 64  # voxels along each axis
_PRECISION = 5e-3  # of a normalised image in float16
log = logging.getLogger(__name__)

Write = Callable[[Path, np.ndarray], None]
Read = Callable[[Path, Sequence[int], Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Format:
    """How to write an array (channels, X, Y, Z), and how to read a box of it as float32."""

    dtype: str
    write: Write
    read: Read
    needs: str


def run(options: argparse.Namespace) -> list[Row]:
    """One generated CT-like volume in every format; all read the same boxes in the same rounds."""
    image = _normalised(options.large_shape)
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        files = {name: (format, Path(folder) / f"{i}") for i, (name, format) in enumerate(formats().items())}
        written = {
            name: _timed(partial(f.write, path, image.astype(f.dtype))) for name, (f, path) in files.items()
        }
        size = options.large_patch
        boxes = random_boxes(image.shape[1:], size, options.reads)
        for name, (format, path) in files.items():
            assert (
                np.abs(format.read(path, boxes[0], size) - box_of(image, boxes[0], size)).max() < _PRECISION
            ), name
        readers = {
            name: (path, partial(_at, format.read, path, size)) for name, (format, path) in files.items()
        }
        times = reads(readers, boxes, REFERENCE)
        megabytes = {name: size_of(path) / 1e6 for name, (_, path) in files.items()}
    case = f"{by(image.shape)} normalised CT, patch {by(size)}"
    kind = {"benchmark": "store", "case": case, "reference": REFERENCE, **conditions(), "threads": 1}
    own = {n: {"MB": megabytes[n], "write_seconds": written[n], "needs": files[n][0].needs} for n in files}
    return [{**kind, "variant": name, **times[name], **own[name]} for name in files]


def formats() -> dict[str, Format]:
    """All formats whose packages are installed; a message names the others."""
    available: dict[str, Format] = {}
    for dtype in ("float32", "float16"):
        available[f"npy {dtype}"] = Format(dtype, _write_npy, _read_npy, "numpy")
        available[f"npy in blocks of {_BLOCK} {dtype}"] = Format(dtype, _write_blocks, _read_blocks, "numpy")
        if _installed("blosc2"):
            for codec, level in (("LZ4", 1), ("ZSTD", 1), ("ZSTD", 5)):
                write = partial(_write_blosc2, codec, level)
                available[f"blosc2 {codec} {level} {dtype}"] = Format(
                    dtype, write, _read_blosc2, "blosc2: C, numexpr, msgpack"
                )
        if _installed("zarr"):
            for packed in (False, True):
                write = partial(_write_zarr, packed)
                name = f"zarr 3 {'zstd' if packed else 'plain'} {dtype}"
                available[name] = Format(
                    dtype, write, _read_zarr, "zarr: numcodecs, a thread for its event loop"
                )
    return available


def reads(
    readers: Mapping[str, tuple[Path, Callable[[Sequence[int]], Any]]],
    boxes: Sequence[Sequence[int]],
    reference: str,
) -> dict[str, Row]:
    """Time readers of the same boxes in turn, once with their files dropped from the page cache and once with
    them there.

    Args: readers: name to file or folder, and what reads a box of it, given its first voxel.
    Returns: `seconds`, `ratio`, `spread` with a hot cache, and `cold_seconds`.
    """
    hot: dict[str, list[float]] = {name: [] for name in readers}
    cold: dict[str, list[float]] = {name: [] for name in readers}
    for start in boxes:
        for name, (path, read) in readers.items():
            drop(path)
            cold[name].append(_timed(partial(read, start)))
            hot[name].append(_timed(partial(read, start)))
    return {n: {**compared(hot[n], hot[reference]), "cold_seconds": median(cold[n])} for n in readers}


def drop(path: Path) -> None:
    """Drop the pages of a file or of a folder's files from the page cache, after writing them to disk."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def size_of(path: Path) -> int:
    """Bytes."""
    return sum(file.stat().st_size for file in _files(path))


def box_of(array: np.ndarray, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    return array[(slice(None), *(slice(s, s + n) for s, n in zip(start, size, strict=True)))]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _at(read: Read, path: Path, size: Sequence[int], start: Sequence[int]) -> np.ndarray:
    return read(path, start, size)


def random_boxes(shape: Sequence[int], size: Sequence[int], count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [[int(rng.integers(0, n - p + 1)) for n, p in zip(shape, size, strict=True)] for _ in range(count)]


def _normalised(shape: Sequence[int]) -> np.ndarray:
    """As a window of soft tissue leaves it."""
    image, _ = volume(shape, 0, "CT")
    return ((image[None].clip(-400, 600) - 50.0) / 120.0).astype(np.float32)


def _installed(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        log.info("%s is not installed and left out: pip install 'medconv[benchmarks]'", name)
        return False
    return True


def _write_npy(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def _read_npy(path: Path, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    return np.array(box_of(np.load(path, mmap_mode="r"), start, size), np.float32)


def _write_blocks(path: Path, array: np.ndarray) -> None:
    """(blocks along X, Y, Z, channels, voxels of a block): a box lies in few runs of the file."""
    counts = [-(-n // _BLOCK) for n in array.shape[1:]]
    padded = np.pad(
        array, [(0, 0), *((0, c * _BLOCK - n) for c, n in zip(counts, array.shape[1:], strict=True))]
    )
    x, y, z = counts
    _write_npy(
        path, padded.reshape(-1, x, _BLOCK, y, _BLOCK, z, _BLOCK).transpose(1, 3, 5, 0, 2, 4, 6).copy()
    )


def _read_blocks(path: Path, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    blocks = np.load(path, mmap_mode="r")
    out = np.empty((blocks.shape[3], *size), np.float32)
    spans = [range(s // _BLOCK, -(-(s + n) // _BLOCK)) for s, n in zip(start, size, strict=True)]
    for place in np.ndindex(*(len(span) for span in spans)):
        block = tuple(span[i] for span, i in zip(spans, place, strict=True))
        inside, outside = [slice(None)], [slice(None)]
        for b, s, n in zip(block, start, size, strict=True):
            low, high = max(b * _BLOCK, s), min((b + 1) * _BLOCK, s + n)
            inside.append(slice(low - b * _BLOCK, high - b * _BLOCK))
            outside.append(slice(low - s, high - s))
        out[tuple(outside)] = blocks[block][tuple(inside)]
    return out


def _write_blosc2(codec: str, level: int, path: Path, array: np.ndarray) -> None:
    import blosc2

    packing = blosc2.CParams(
        codec=blosc2.Codec[codec], clevel=level, nthreads=1, filters=[blosc2.Filter.SHUFFLE]
    )
    chunks, blocks = ((1, *(min(edge, n) for n in array.shape[1:])) for edge in (_CHUNK, _BLOCK))
    blosc2.asarray(array, chunks=chunks, blocks=blocks, urlpath=str(path), mode="w", cparams=packing)


def _read_blosc2(path: Path, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    import blosc2

    array: Any = blosc2.open(str(path), mode="r", mmap_mode="r", dparams=blosc2.DParams(nthreads=1))
    return box_of(array, start, size).astype(np.float32)


def _write_zarr(packed: bool, path: Path, array: np.ndarray) -> None:
    import zarr

    chunks = (1, *(min(_CHUNK, n) for n in array.shape[1:]))
    settings: dict[str, Any] = {} if packed else {"compressors": None}
    zarr.create_array(store=str(path), shape=array.shape, chunks=chunks, dtype=array.dtype, **settings)[:] = (
        array
    )


def _read_zarr(path: Path, start: Sequence[int], size: Sequence[int]) -> np.ndarray:
    import zarr

    return np.asarray(box_of(zarr.open_array(str(path), mode="r"), start, size), np.float32)
