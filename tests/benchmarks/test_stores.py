"""scripts/benchmarks/stores.py: every format reads the box that was written, and files leave the page cache."""

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import stores


@pytest.mark.parametrize("name", stores.formats())
@pytest.mark.parametrize("start", [(0, 0, 0), (31, 32, 1), (49, 41, 20)])
def test_a_box_across_blocks_or_at_the_edge_is_read_back(name, start, tmp_path):
    seed = [*name.encode(), *start]  # reused memory must not hold the expected values
    array = np.random.default_rng(seed).normal(size=(2, 70, 65, 40)).astype(np.float32)
    format = stores.formats()[name]
    format.write(tmp_path / "array", array.astype(format.dtype))
    size = (21, 24, 20)
    box = format.read(tmp_path / "array", start, size)
    assert box.dtype == np.float32
    np.testing.assert_array_equal(
        box, stores.box_of(array.astype(format.dtype).astype(np.float32), start, size)
    )


def test_files_are_written_to_disk_before_their_pages_are_dropped(monkeypatch, tmp_path):
    """Only the calls are checked: the system may keep the pages all the same."""
    calls = []

    def name(descriptor):
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    monkeypatch.setattr(stores.os, "fsync", lambda descriptor: calls.append(("fsync", name(descriptor))))
    monkeypatch.setattr(
        stores.os, "posix_fadvise", lambda descriptor, *advice: calls.append((*advice, name(descriptor)))
    )
    for file in ("a", "inner/b"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"content")
    stores.drop(tmp_path)
    assert sorted(calls[::2]) == [("fsync", "a"), ("fsync", "b")]
    assert calls[1::2] == [(0, 0, os.POSIX_FADV_DONTNEED, name) for _, name in calls[::2]]
