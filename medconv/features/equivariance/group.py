"""Groups of reflections and quarter turns of an image: how they act on it, and their products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor


@dataclass(frozen=True)
class Motion:
    """A reflection, a quarter turn or a product of them: it permutes and flips the spatial axes.

    Args:
        order: of the result's axes, by their number before.
        flipped: whether each of the result's axes is flipped.
    """

    order: tuple[int, ...]
    flipped: tuple[bool, ...]

    def __matmul__(self, first: Motion) -> Motion:
        """The motion that does `first`, then this one."""
        order = tuple(first.order[axis] for axis in self.order)
        flipped = tuple(
            own != first.flipped[axis] for own, axis in zip(self.flipped, self.order, strict=True)
        )
        return Motion(order, flipped)

    def __call__(self, tensor: Tensor, start: int) -> Tensor:
        """The tensor with its spatial axes moved. Args: start: the first spatial axis."""
        moved = [start + axis for axis in self.order]
        others = list(range(start + len(self.order), tensor.ndim))
        permuted = tensor.permute(*range(start), *moved, *others)
        return permuted.flip([start + axis for axis, flips in enumerate(self.flipped) if flips])

    def __str__(self) -> str:
        flips = [str(axis) for axis, flips in enumerate(self.flipped) if flips]
        moved = [str(axis) for axis, before in enumerate(self.order) if axis != before]
        texts = [f"swapping axes {', '.join(moved)}"] if moved else []
        texts += [f"flipping axis {' and '.join(flips)}"] if flips else []
        return " and ".join(texts) or "no motion"


@dataclass(frozen=True)
class Group:
    """All products of flips of some axes and of quarter turns in some planes.

    Args:
        spatial_dims: of the image.
        axes: along which it may be flipped.
        planes: pairs of axes in which it may be turned.
    Raises:
        ValueError: an axis that the image does not have, or a repeated one.
    """

    spatial_dims: int
    axes: tuple[int, ...]
    planes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        axes = [*self.axes, *(axis for plane in self.planes for axis in plane)]
        if max(axes) >= self.spatial_dims:
            raise ValueError(f"axes must lie below {self.spatial_dims}, the image's spatial axes, got {axes}")

    @cached_property
    def generators(self) -> tuple[Motion, ...]:
        """A flip of each axis, and a quarter turn in each plane."""
        straight = tuple(range(self.spatial_dims))
        flips = [Motion(straight, tuple(axis == own for own in straight)) for axis in self.axes]
        turns = []
        for first, second in self.planes:
            order = list(straight)
            order[first], order[second] = second, first
            turns.append(Motion(tuple(order), tuple(axis == first for axis in straight)))
        return (*flips, *turns)

    @cached_property
    def elements(self) -> tuple[Motion, ...]:
        """All of them, the one that moves nothing first.

        Flips alone are in the order of binary numbers, the first of `axes` the highest digit.
        """
        straight = tuple(range(self.spatial_dims))
        elements = []
        for chosen in product((False, True), repeat=len(self.axes)):
            flipped = {axis for axis, flips in zip(self.axes, chosen, strict=True) if flips}
            elements.append(Motion(straight, tuple(axis in flipped for axis in straight)))
        for element in elements:  # grows while it is walked
            for generator in self.generators:
                if generator @ element not in elements:
                    elements.append(generator @ element)
        return tuple(elements)

    def __len__(self) -> int:
        return len(self.elements)

    @cached_property
    def inverses(self) -> tuple[int, ...]:
        """For each element the number of the one that undoes it."""
        identity = self.elements[0]
        return tuple(
            next(i for i, other in enumerate(self.elements) if other @ element == identity)
            for element in self.elements
        )

    @cached_property
    def products(self) -> tuple[list[int], ...]:
        """`products[h][g]`: the number of the element that does g, then h."""
        numbers = {element: number for number, element in enumerate(self.elements)}
        return tuple([numbers[h @ g] for g in self.elements] for h in self.elements)

    @property
    def flips(self) -> tuple[int, ...]:
        """The axes whose flip alone is one of the elements."""
        straight = tuple(range(self.spatial_dims))
        alone = (Motion(straight, tuple(axis == own for own in straight)) for axis in straight)
        return tuple(axis for axis, flip in enumerate(alone) if flip in self.elements)

    def orbit(self, kernel: Tensor, start: int, dim: int) -> Tensor:
        """The kernel moved by each element, stacked along a new axis `dim`. Args: start: as in a motion."""
        return torch.stack([element(kernel, start) for element in self.elements], dim)
