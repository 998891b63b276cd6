"""Oracle of surface distances: neighbours by loops, every pair of places, no crop, no tree."""

from collections.abc import Callable, Sequence

import numpy as np


def boundary(mask: np.ndarray) -> np.ndarray:
    """Places of the voxels of a mask that have a face neighbour outside of it, or lie at the array's edge."""
    return np.array(
        [place for place in np.ndindex(mask.shape) if mask[place] and not all(_neighbours(mask, place))]
    )


def corners(mask: np.ndarray) -> np.ndarray:
    """Places of the corners whose surrounding voxels are not all in, nor all out; corner i lies before
    voxel i.
    """
    places = []
    for place in np.ndindex(*[n + 1 for n in mask.shape]):
        around = [
            _at(mask, [p - step for p, step in zip(place, steps, strict=True)])
            for steps in np.ndindex(*[2] * mask.ndim)
        ]
        if any(around) and not all(around):
            places.append(place)
    return np.array(places)


def directed(
    a: np.ndarray, b: np.ndarray, spacing: Sequence[float], places: Callable = boundary
) -> tuple[np.ndarray, np.ndarray]:
    """From each place of a to the nearest of b, and from each of b to the nearest of a, in mm."""
    pairs = (places(a)[:, None] - places(b)[None]) * np.array(spacing)
    distances = np.sqrt((pairs**2).sum(-1))
    return distances.min(1), distances.min(0)


def hd95(a: np.ndarray, b: np.ndarray, spacing: Sequence[float]) -> float:
    return max(np.percentile(d, 95) for d in directed(a, b, spacing))


def average_distance(a: np.ndarray, b: np.ndarray, spacing: Sequence[float]) -> float:
    there, back = directed(a, b, spacing)
    return (there.sum() + back.sum()) / (len(there) + len(back))


def _neighbours(mask: np.ndarray, place: tuple[int, ...]) -> list[bool]:
    steps = [sign * np.eye(mask.ndim, dtype=int)[axis] for axis in range(mask.ndim) for sign in (-1, 1)]
    return [_at(mask, np.add(place, step)) for step in steps]


def _at(mask: np.ndarray, place: Sequence[int]) -> bool:
    inside = all(0 <= p < n for p, n in zip(place, mask.shape, strict=True))
    return inside and bool(mask[tuple(place)])
