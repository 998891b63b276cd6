"""Decompression of gzip files into memory that is there already.

`gzip` takes 8 kB at a time, and nibabel copies what it returns into memory that was set to 0 before: together
nearly twice the time of the decompression.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

_WITH_HEADER = 16 + zlib.MAX_WBITS  # that of gzip, and its checksum, which zlib compares
_COMPRESSED_BYTES = 2**17  # that are read at once
_PIECE_BYTES = 2**18  # that are decompressed at once, and stay in the cache until they are copied


def read_into(target: memoryview, path: Path, offset: int) -> None:
    """Decompress a file to its end, which verifies its checksums.

    Args:
        target: bytes; gets those from `offset` on. More that follow are left out.
    Raises:
        EOFError: the file ends too early.
        zlib.error: it is damaged.
    """
    position = -offset
    for piece in _pieces(path):
        wanted = piece[max(0, -position) : max(0, len(target) - position)]
        start = max(0, position)
        target[start : start + len(wanted)] = wanted
        position += len(piece)
    if position < len(target):
        raise EOFError(f"Expected {len(target)} bytes, got {max(0, position)}")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        compressed = file.read(_COMPRESSED_BYTES)
        # One after the other of what was compressed by itself: `bgzip` writes many blocks.
        while compressed:
            block = zlib.decompressobj(_WITH_HEADER)
            while not block.eof:
                if not compressed:
                    raise EOFError("it ends in the middle of its compressed content")
                yield block.decompress(compressed, _PIECE_BYTES)
                compressed = block.unused_data if block.eof else block.unconsumed_tail
                compressed = compressed or file.read(_COMPRESSED_BYTES)
            # `gzip` ignores such padding, too.
            while compressed and not (compressed := compressed.lstrip(b"\0")):
                compressed = file.read(_COMPRESSED_BYTES)
