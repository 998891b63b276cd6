"""medconv/data/io/gunzip.py: the same bytes as `gzip`, and its errors."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest

from medconv.data.io import gunzip
from medconv.data.io.gunzip import read_into

CONTENT = np.random.default_rng(0).integers(0, 20, 5000).astype(np.uint8).tobytes()


def read(path: Path, offset: int = 0, count: int = len(CONTENT)) -> bytes:
    target = np.empty(count, np.uint8)
    read_into(target.data, path, offset)
    return target.tobytes()


@pytest.mark.parametrize("at_once", [7, 2**17])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("padding", [b"", b"\0" * 600])
def test_the_bytes_are_those_of_gzip(
    at_once: int, blocks: int, padding: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of several blocks in a file, and with zeros behind it or between them."""
    monkeypatch.setattr(gunzip, "_COMPRESSED_BYTES", at_once)
    monkeypatch.setattr(gunzip, "_PIECE_BYTES", 100)
    path = tmp_path / "file.gz"
    length = -(-len(CONTENT) // blocks)
    parts = [CONTENT[first : first + length] for first in range(0, len(CONTENT), length)]
    path.write_bytes(b"".join(gzip.compress(part) + padding for part in parts))
    assert gzip.decompress(path.read_bytes()) == CONTENT == read(path)
    assert read(path, offset=352, count=1000) == CONTENT[352:1352]
    assert read(path, offset=4000, count=1000) == CONTENT[4000:]


@pytest.mark.parametrize("at_once", [1, 50, 2**17])
def test_a_damaged_file_is_an_error(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gunzip, "_COMPRESSED_BYTES", at_once)
    path = tmp_path / "file.gz"
    whole = gzip.compress(CONTENT)
    for cut in (len(whole) - 1, len(whole) - 8, len(whole) // 2, 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(EOFError, match="ends in the middle"):
            read(path)
    path.write_bytes(whole)
    with pytest.raises(EOFError, match="Expected 5001 bytes, got 5000"):
        read(path, count=5001)
    with pytest.raises(EOFError, match="Expected 10 bytes, got 0"):
        read(path, offset=6000, count=10)
    for damaged in (
        zlib.compress(CONTENT),
        whole[:-8] + b"\1" + whole[-7:],
        whole + b"more",
        b"no gzip",
        whole[:-1] + b"\1",
    ):
        path.write_bytes(damaged)
        with pytest.raises(zlib.error):
            read(path, count=10)


def test_little_is_decompressed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of zeros is a thousandth of its content."""
    monkeypatch.setattr(gunzip, "_PIECE_BYTES", 100)
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(bytes(10**5)))
    assert max(len(piece) for piece in gunzip._pieces(path)) == 100
