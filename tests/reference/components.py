"""Oracle of post-processing: components found by flood fill, voxel by voxel."""

from itertools import product

import numpy as np

Voxel = tuple[int, ...]


def components(voxels: set[Voxel], faces_only: bool = False) -> list[set[Voxel]]:
    steps = [d for d in product((-1, 0, 1), repeat=3) if any(d) and (not faces_only or sum(map(abs, d)) == 1)]
    left, groups = set(voxels), []
    while left:
        group, edge = set(), [left.pop()]
        while edge:
            voxel = edge.pop()
            group.add(voxel)
            for step in steps:
                neighbour = tuple(a + b for a, b in zip(voxel, step, strict=True))
                if neighbour in left:
                    left.remove(neighbour)
                    edge.append(neighbour)
        groups.append(group)
    return groups


def voxels_of(label: np.ndarray, values: tuple[int, ...]) -> set[Voxel]:
    return {place for place in np.ndindex(label.shape) if label[place] in values}


def keep_largest(label: np.ndarray, values: tuple[int, ...]) -> np.ndarray:
    groups = components(voxels_of(label, values))
    largest = max((len(group) for group in groups), default=0)
    return _without(label, [group for group in groups if len(group) < largest])


def remove_small(label: np.ndarray, values: tuple[int, ...], min_mm3: float, voxel_mm3: float) -> np.ndarray:
    return _without(label, [g for g in components(voxels_of(label, values)) if len(g) * voxel_mm3 < min_mm3])


def fill_holes(label: np.ndarray, value: int) -> np.ndarray:
    """Groups of background all of whose neighbours are of one class, none of them beyond the image (but
    across a slice).
    """
    result = label.copy()
    for group in components(voxels_of(label, (0,)), faces_only=True):
        around = set()
        for voxel in group:
            for axis, step in product(range(3), (-1, 1)):
                place = tuple(v + step * (axis == a) for a, v in enumerate(voxel))
                inside = all(0 <= p < n for p, n in zip(place, label.shape, strict=True))
                if place not in group and (inside or label.shape[axis] > 1):
                    around.add(int(label[place]) if inside else -1)
        if around == {value}:
            for voxel in group:
                result[voxel] = value
    return result


def _without(label: np.ndarray, groups: list[set[Voxel]]) -> np.ndarray:
    result = label.copy()
    for group in groups:
        for voxel in group:
            result[voxel] = 0
    return result
