"""What metrics need to know of targets and grids; `targets/` and `data/` implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class LabelValues(Protocol):
    """The foreground of label maps: the values that each class or region stands for, and the value to
    ignore.
    """

    @property
    def ignore(self) -> int | None: ...

    @property
    def num_values(self) -> int: ...

    @property
    def by_name(self) -> Mapping[str, tuple[int, ...]]: ...


class Outputs(Protocol):
    """What the outputs for a whole image are: their kind and their names."""

    @property
    def kind(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_values(self) -> int: ...


class VoxelGrid(Protocol):
    """The grid of a label map."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def spacing_mm(self) -> tuple[float, ...]: ...

    @property
    def voxel_mm3(self) -> float: ...
