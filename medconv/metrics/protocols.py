"""Protocols for the targets and grids that metrics need; `targets/` and `data/` implement them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class LabelValues(Protocol):
    """The foreground of label maps: the label values of each class or region, and the value to ignore."""

    @property
    def ignore(self) -> int | None: ...

    @property
    def num_values(self) -> int: ...

    @property
    def by_name(self) -> Mapping[str, tuple[int, ...]]: ...


class Outputs(Protocol):
    """Image-level outputs: their kind (multiclass, multilabel, regression) and names."""

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
