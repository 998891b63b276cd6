"""The spatial axes that an argument names."""

from collections.abc import Sequence
from typing import Any

from medconv.utils.errors import ArgumentError


def mirrored_axes(axes: Sequence[int] | str, spatial_dims: int) -> tuple[int, ...]:
    """The axes of `mirror_axes`. Raises: ArgumentError: neither different spatial axes nor `all`."""
    if axes == "all":
        return tuple(range(spatial_dims))
    return check_axes("mirror_axes", axes, spatial_dims, also=", or `all`")


def check_axes(name: str, axes: Any, spatial_dims: int, also: str = "") -> tuple[int, ...]:
    """The axes of an argument. Raises: ArgumentError: not different spatial axes of the image."""
    is_list = isinstance(axes, Sequence) and not isinstance(axes, str)
    valid = is_list and all(type(axis) is int and 0 <= axis < spatial_dims for axis in axes)
    if not valid or len(set(axes)) != len(axes):
        axis_range = f"different spatial axes from 0 to {spatial_dims - 1}{also}"
        raise ArgumentError(name, f" must be {axis_range}, got {axes}")
    return tuple(axes)
