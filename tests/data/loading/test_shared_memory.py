"""medconv/data/loading/shared_memory.py: whether the batches of loader workers fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medconv.data.loading.shared_memory import check_room, largest_case_bytes, patch_bytes
from medconv.data.preprocessing.store import NOTHING, Entry
from medconv.utils.errors import ArgumentError


def entry(channels: int, *shape: int, label: bool = True) -> Entry:
    image = np.zeros((channels, *shape), np.float32)
    no_crop: Any = None
    return Entry(image, np.zeros(shape, np.int16) if label else NOTHING, NOTHING, no_crop)


def test_bytes_count_all_channels_and_the_label_map() -> None:
    assert patch_bytes(entry(4, 9, 9), 1000) == 1000 * (4 * 4 + 2)
    assert patch_bytes(entry(3, 9, 9, label=False), 81) == 81 * 3 * 4
    assert largest_case_bytes([entry(1, 9, 9), entry(2, 10, 5)]) == 81 * (4 + 2 * 2)
    assert largest_case_bytes([]) == 0


def test_too_little_room_is_an_error_that_says_what_helps(tmp_path: Path) -> None:
    check_room(1000.0, 2, folder=tmp_path)
    check_room(1e18, 0, folder=tmp_path)  # no workers
    check_room(1e18, 2, folder=tmp_path / "absent")
    with pytest.raises(ArgumentError) as caught:
        check_room(1e18, 2, 4, tmp_path)
    message = caught.value.renamed(lambda name: f"data.{name}")
    assert message.startswith("data.num_workers=2 in each of 4 processes: the batches")
    assert f"need about 8000000000.0 GB in {tmp_path}" in message
    assert "docker run --shm-size=" in message
    assert message.endswith("or a smaller data.prefetch_factor or data.batch_size")
