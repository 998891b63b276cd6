"""medconv/data/loading/samplers/corners.py: compared with loops over all corners and voxels."""

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from medconv.data.loading.samplers.corners import (
    corner_around,
    foreground_corner,
    foreground_voxel,
    random_corner,
    split_foreground,
)

ROWS = np.array([[0, 1, 1], [0, 5, 5], [1, 2, 3], [1, 2, 4], [1, 2, 5], [3, 6, 6]])


def entry(rows: np.ndarray, shape: tuple[int, ...] = (9, 9)) -> Any:
    return SimpleNamespace(label=np.zeros(shape, np.uint8), foreground=rows)


def slow_corners(image_size: int, patch_size: int) -> list[int]:
    """All corners of patches inside the image; the one that pads both sides where the image is smaller."""
    inside = [corner for corner in range(image_size) if corner + patch_size <= image_size]
    padding = patch_size - image_size
    return inside or [-((padding + 1) // 2)]


def test_every_corner_inside_is_drawn() -> None:
    rng = np.random.default_rng(0)
    image_shape, box = (5, 4, 3), (3, 4, 6)
    drawn = Counter(tuple(random_corner(rng, image_shape, box).tolist()) for _ in range(300))
    assert set(drawn) == set(product(*map(slow_corners, image_shape, box)))
    assert min(drawn.values()) > 70


@pytest.mark.parametrize("box", [(1,), (3,), (4,), (7,), (10,)])
def test_a_voxel_is_as_central_as_the_image_allows(box: tuple[int]) -> None:
    image_shape = (7,)
    for voxel in range(7):
        (corner,) = corner_around((voxel,), image_shape, box)
        allowed = slow_corners(7, box[0])
        assert corner == min(allowed, key=lambda first: abs(first + box[0] // 2 - voxel))


def test_a_random_voxel_is_of_a_random_class() -> None:
    rng = np.random.default_rng(0)
    drawn = Counter(tuple(foreground_voxel(ROWS[2:], rng).tolist()) for _ in range(600))
    assert 260 < drawn[6, 6] < 340  # one voxel of class 3 as often as three of class 1
    assert all(70 < drawn[2, y] < 130 for y in (3, 4, 5))


def test_labelled_voxels_are_apart_from_the_foreground() -> None:
    labelled, foreground = split_foreground(ROWS)
    assert labelled.tolist() == ROWS[:2].tolist() and foreground.tolist() == ROWS[2:].tolist()
    labelled, foreground = split_foreground(ROWS[2:])
    assert len(labelled) == 0 and foreground.tolist() == ROWS[2:].tolist()
    assert [len(rows) for rows in split_foreground(ROWS[:0])] == [0, 0]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_share_of_patches_is_centred_on_foreground(share: float) -> None:
    rng = np.random.default_rng(1)
    corners = [tuple(foreground_corner(rng, entry(ROWS[2:]), (1, 1), share).tolist()) for _ in range(500)]
    on_foreground = sum(corner in {(2, 3), (2, 4), (2, 5), (6, 6)} for corner in corners) / 500
    by_chance = 4 / 81
    assert on_foreground == pytest.approx(share + (1 - share) * by_chance, abs=0.06)


def test_with_a_value_to_ignore_all_patches_are_centred_on_labelled_voxels() -> None:
    rng = np.random.default_rng(2)
    corners = {tuple(foreground_corner(rng, entry(ROWS), (1, 1), 0.5).tolist()) for _ in range(200)}
    assert corners == {(1, 1), (5, 5), (2, 3), (2, 4), (2, 5), (6, 6)}


def test_only_the_given_classes_are_centred_on() -> None:
    rng = np.random.default_rng(3)
    rows = ROWS[2:]
    drawn = {tuple(foreground_corner(rng, entry(rows), (1, 1), 1.0, [3]).tolist()) for _ in range(20)}
    assert drawn == {(6, 6)}
    anywhere = {tuple(foreground_corner(rng, entry(rows), (1, 1), 1.0, [2]).tolist()) for _ in range(50)}
    assert len(anywhere) > 20  # the case has no voxel of class 2
