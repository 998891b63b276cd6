"""Random factors and rotations from numbers between 0 and 1."""

from collections.abc import Callable, Sequence

import numpy as np

Draw = Callable[[], float]  # returns the next random number of a sample, from 0 to 1


def plane_rotation(axes: int, first: int, second: int, angle: float) -> np.ndarray:
    """A rotation in the plane of two axes. Shape: (axes, axes)."""
    rotation = np.eye(axes)
    rotation[first, first] = np.cos(angle)
    rotation[second, second] = np.cos(angle)
    rotation[first, second] = -np.sin(angle)
    rotation[second, first] = np.sin(angle)
    return rotation


def factor(draw: Draw, limits: Sequence[float]) -> float:
    """As often below 1 as above, if the range contains 1."""
    low, high = limits
    is_below = draw() < 0.5
    if low < 1 < high:
        low, high = (low, 1.0) if is_below else (1.0, high)
    return between(draw, (low, high))


def between(draw: Draw, limits: Sequence[float]) -> float:
    """Uniform from low to high."""
    low, high = limits
    return low + draw() * (high - low)
