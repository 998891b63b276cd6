"""The store of prepared cases: memory-mapped arrays, one folder per preprocessing config.

Reading a patch touches only the pages of that patch; all workers and ranks of a node share the page cache.
With `data.store=blosc2` they are compressed, apart from the foreground.
"""

import json
import mmap
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.io.images import stamp
from medconv.data.preprocessing.compressed import CompressedArray, Compression
from medconv.data.preprocessing.preprocess import NOTHING, CropInfo, Entry
from medconv.utils.atomic_io import NO_ROOM, replacing, write_text

_ARRAYS = ("image", "label", "foreground", "soft_label")  # of an entry; not all have all of them
_WITH_VOXELS = ("image", "label", "soft_label")  # those that a store may compress
# Bytes; a smaller image-level entry is not flushed to disk, its checksum is compared at each start instead
_LIGHT = 128 * 1024
# What reading an absent or damaged record raises
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_WRONG_CHECKSUM = "the checksum of {} is wrong, the disk or a copy changed it"
_BLOCK = 4 * 2**20  # bytes that are read at once
_DTYPES = ("<f4", "<f2", "|u1", "<i2", "<i4")
_SHARE = 0.02  # of a core's time, and of the disk's
_WAITS_PER_READ = (1 - _SHARE) / _SHARE


@dataclass(frozen=True)
class Store:
    """Prepared cases in `folder`, whose name is the hash of the config.

    An entry exists when its record `CASE.json` exists, which is renamed into place last. The record has the
    config, the source files, and size, modification time and CRC-32 of each array.

    Args:
        compression: of the arrays that are written; the record says which are compressed.
    """

    folder: Path
    compression: Compression | None = None

    def has(self, case: Case, verify: bool = False) -> bool:
        """Whether the case is present, undamaged, and made from the current files.

        An array with another size is damaged. If its modification time differs, as in a copy, the checksum
        decides.

        Args:
            verify: read every array and compare its checksum.
        """
        try:
            record = self._record(case.id)
            # Among the sources are the files of the label, so the entry has all arrays that the case needs
            sources = signature(case)
            if record["config"] != self.folder.name or record["sources"] != sources or sources is None:
                return False
            recorded = record["arrays"]
            is_light = case.label is None and recorded["image"]["size"] < _LIGHT
            current = {
                name: _state(self._path_of(case.id, name, array), array, verify or is_light)
                for name, array in recorded.items()
            }
            if any(current[name]["crc32"] != array["crc32"] for name, array in recorded.items()):
                return False
            if current != recorded:
                with suppress(OSError):  # a read-only store can still be read
                    self._commit(case.id, {**record, "arrays": current})  # new times: read nothing next time
            return True
        except BROKEN:  # absent or damaged
            return False

    def write(self, case: Case, entry: Entry, sources: list[list[Any]] | None = None) -> None:
        """Add or replace a case; readers see the old entry, the new one or none, even after a power cut.

        Args:
            sources: the `signature` of the files before they were read; None: that of now.
        Raises:
            ValueError: the folder is not writable, or the disk is full.
        """
        arrays = {name: getattr(entry, name) for name in _ARRAYS if getattr(entry, name) is not NOTHING}
        is_light = entry.label is NOTHING and entry.image.nbytes < _LIGHT - 1024  # room for the header
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Without its record the entry does not exist, while its arrays are replaced.
            self._record_path(case.id).unlink(missing_ok=True)
            saved = {}
            for name, array in arrays.items():
                content = None
                if self.compression is not None and name in _WITH_VOXELS:
                    content = self.compression.compressed(array, entry.image.ndim - 1)
                path = self._array_path(case.id, name, is_compressed=content is not None)
                saved[name] = _save(path, array, not is_light, content)
            record = {
                "config": self.folder.name,
                "sources": sources or signature(case),
                "arrays": saved,
                "crop_info": asdict(entry.crop_info),
            }
            self._commit(case.id, record)
        except OSError as error:
            bytes_needed = sum(array.nbytes for array in arrays.values())
            raise ValueError(f"case {case.id}: {_unwritable(self.folder, bytes_needed, error)}") from error

    def read(self, case_id: str, verify: bool = False) -> Entry:
        """A case.

        Args:
            verify: compare checksums, which reads all of the case; a damaged one is prepared anew at the next
                start.
        Raises:
            ValueError: the case is not in the store, or its files are damaged.
        """
        with self._explaining(case_id):
            record = self._record(case_id)
            arrays: dict[str, Any] = dict.fromkeys(_ARRAYS, NOTHING)
            for name, recorded in record["arrays"].items():
                arrays[name], pages = _mapped(self._path_of(case_id, name, recorded), recorded)
                if verify and zlib.crc32(pages) != recorded["crc32"]:
                    self.discard(case_id)
                    raise ValueError(_WRONG_CHECKSUM.format(name))
            # JSON's lists become tuples again
            values = record["crop_info"]
            crop_info = CropInfo(
                grid=Grid.from_plain(values["grid"]),
                shape=tuple(values["shape"]),
                box=tuple((start, stop) for start, stop in values["box"]),
                reoriented=values["reoriented"],
                nearest_axis=values["nearest_axis"],
            )
            entry = Entry(**arrays, crop_info=crop_info)
            fit_together = entry.image.shape[1:] == entry.label.shape and entry.foreground.ndim == 2
            if "label" in record["arrays"] and not fit_together:
                raise ValueError("image, label and foreground do not belong together")
            return entry

    def verify(self, case_id: str) -> Iterator[None]:
        """Compare the checksums of a case, of which each step of the iteration reads a block; a damaged case
        stays, as others may be reading it.

        Raises:
            ValueError: as `read`.
        """
        with self._explaining(case_id):
            for name, recorded in self._record(case_id)["arrays"].items():
                checksum = 0
                for so_far in _checksums(self._path_of(case_id, name, recorded)):
                    checksum = so_far
                    yield
                if checksum != recorded["crc32"]:
                    raise ValueError(_WRONG_CHECKSUM.format(name))

    def discard(self, case_id: str) -> None:
        """The next start prepares this case anew."""
        with suppress(OSError):  # a read-only store, which only another copy can mend
            self._record_path(case_id).unlink()

    @contextmanager
    def _explaining(self, case_id: str) -> Iterator[None]:
        """Raises: ValueError: names the case, for any error of reading it."""
        try:
            yield
        except BROKEN as error:
            raise ValueError(
                f"case {case_id}: its prepared files in {self.folder} cannot be read ({error}); run again "
                "to rebuild the damaged files"
            ) from error

    def digest(self, case_id: str) -> int:
        """A number that changes with the content of a case's prepared arrays, not with the times of files.

        Raises: ValueError: the case's record is damaged or absent.
        """
        try:
            record = self._record(case_id)
            # A compressed array has the digest of the same values uncompressed
            checksums = {n: a.get("uncompressed_crc32", a["crc32"]) for n, a in record["arrays"].items()}
            return _seal({"arrays": checksums, "crop_info": record["crop_info"]})
        except BROKEN as error:
            raise ValueError(f"case {case_id}: no record of it in {self.folder} ({error})") from error

    def size(self) -> int:
        """Bytes on disk; 0 if the store does not exist yet."""
        total = 0
        for path in self.folder.glob("*"):
            with suppress(FileNotFoundError):  # another process that prepares has renamed it by now
                if path.is_file():
                    total += path.stat().st_size
        return total

    def _record(self, case_id: str) -> dict[str, Any]:
        record = json.loads(self._record_path(case_id).read_text(encoding="utf-8"))
        if record.pop("crc32") != _seal(record):
            raise ValueError("the record's checksum is wrong")
        return record  # type: ignore[no-any-return]

    def _commit(self, case_id: str, record: dict[str, Any]) -> None:
        write_text(self._record_path(case_id), json.dumps({**record, "crc32": _seal(record)}))

    def _record_path(self, case_id: str) -> Path:
        return self.folder / f"{case_id}.json"

    def _path_of(self, case_id: str, name: str, recorded: Mapping[str, Any]) -> Path:
        """Of an array, by its record."""
        return self._array_path(case_id, name, "uncompressed_crc32" in recorded)

    def _array_path(self, case_id: str, name: str, is_compressed: bool) -> Path:
        return self.folder / f"{case_id}.{name}.{'b2nd' if is_compressed else 'npy'}"


def signature(case: Case) -> list[list[Any]] | None:
    """Changes if a file of the case changes: path and `stamp` of each; None: a file cannot be examined."""
    try:
        return [[str(path.resolve()), *stamp(path)] for path in case.files]
    except (OSError, ValueError):
        return None


def _save(
    path: Path, array: np.ndarray, durable: bool = True, compressed: bytes | None = None
) -> dict[str, Any]:
    """Write an array. Args: compressed: what is written in place of it. Returns: its record."""
    values = np.ascontiguousarray(array)
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(values))
    crc32 = zlib.crc32(values.data, zlib.crc32(header.getvalue()))
    with replacing(path, durable) as partial:
        with partial.open("wb") as file:
            if compressed is None:
                file.write(header.getvalue())
                file.write(values.data)  # numpy's own writing hides why a disk fails
            else:
                file.write(compressed)
        stat = partial.stat()
    record = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "crc32": crc32}
    described = {"shape": array.shape, "dtype": array.dtype.str}
    if compressed is not None:
        return {**record, **described, "crc32": zlib.crc32(compressed), "uncompressed_crc32": crc32}
    # Where the values begin, behind the header
    return {**record, **described, "offset": stat.st_size - array.nbytes}


def _mapped(path: Path, recorded: dict[str, Any]) -> tuple[Any, mmap.mmap]:
    """Map the array of a file by the shape and type in its record; ten times faster than `np.load`.

    Returns the array, and all bytes of the file.

    The record may come from a copied store, so its values are validated against the file.
    """
    shape = tuple(map(int, recorded["shape"]))
    dtype = np.dtype(str(recorded["dtype"]))
    is_valid = dtype.str in _DTYPES and min(shape, default=-1) >= 0
    is_compressed = "uncompressed_crc32" in recorded
    offset = 0
    if not is_compressed:
        offset = int(recorded["offset"])
        is_valid = is_valid and offset >= 0 and offset + prod(shape) * dtype.itemsize == recorded["size"]
    if not is_valid:
        raise ValueError(f"the record does not describe {path.name}")
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(pages) != recorded["size"]:
        raise ValueError(f"{path.name} is not as it was written")
    if is_compressed:
        return CompressedArray(pages, path.name, shape, dtype), pages
    if pages[:6] != np.lib.format.MAGIC_PREFIX:
        raise ValueError(f"{path.name} is not as it was written")
    return np.ndarray(shape, dtype, buffer=pages, offset=offset), pages


def _state(path: Path, recorded: dict[str, Any], verify: bool) -> dict[str, Any]:
    """The current state of a file, as `_save` returns it; computes the checksum only if needed."""
    stat = path.stat()
    state = {**recorded, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if stat.st_size != recorded["size"]:
        state["crc32"] = -1  # matches no file
    elif verify or stat.st_mtime_ns != recorded["mtime_ns"]:
        *_, state["crc32"] = _checksums(path)
    return state


def _checksums(path: Path) -> Iterator[int]:
    """The checksum of a file up to the end of each of its blocks; the last one is that of the file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            yield crc


def _seal(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _unwritable(folder: Path, bytes_needed: int, error: OSError) -> str:
    if error.errno not in NO_ROOM:
        return f"cannot write to {folder} ({error.strerror}); choose another cache_dir"
    bytes_free = shutil.disk_usage(folder).free
    return (
        f"no room in {folder} ({error.strerror}): this case needs {bytes_needed / 1e6:.1f} MB, "
        f"{bytes_free / 1e6:.1f} MB are free; make room, or choose another cache_dir. Prepared "
        "cases are kept; run again to continue"
    )


class StoreCheck:
    """Reads all training cases once, in a thread that is idle most of the time.

    Args:
        cases: their ids.
    """

    def __init__(self, store: Store, cases: Sequence[str]) -> None:
        self._store = store
        self._cases = cases
        self._damaged = ""  # the id of a damaged case
        self._error: ValueError | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def go_on(self, step: int) -> None:
        """Begin at the first call.

        Args:
            step: of the run; it decides the first case, so that a run that is stopped often gets to all.
        Raises:
            ValueError: a case is damaged; names it.
        """
        if self._thread is None:
            first = step % len(self._cases)
            cases = [*self._cases[first:], *self._cases[:first]]
            self._thread = threading.Thread(target=self._verify, args=(cases,), daemon=True)
            self._thread.start()
        if self._error is not None:
            self._store.discard(self._damaged)  # not before: loader workers would miss its record
            raise ValueError(f"{self._error}; since its start, this run may have trained on the damage")

    def stop(self) -> None:
        """End the check after the block that is being read; does not wait for a disk that never answers."""
        self._stopped.set()

    def _verify(self, cases: Sequence[str]) -> None:
        for case in cases:
            try:
                begin = time.monotonic()
                for _ in self._store.verify(case):
                    read_seconds = time.monotonic() - begin
                    if self._stopped.wait(read_seconds * _WAITS_PER_READ):
                        return
                    begin = time.monotonic()
            except ValueError as error:
                self._damaged = case
                self._error = error
                return
