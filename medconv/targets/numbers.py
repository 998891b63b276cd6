"""Targets with a number per name and image: what multilabel and regression targets share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from medconv.targets.base import finite_number
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.errors import ArgumentError


@dataclass(frozen=True)
class NumberTargets(ImageLevelTargets):
    """A case has a number for each name, in a column each."""

    @classmethod
    def from_columns(
        cls, columns: Sequence[str], labels: Sequence[Sequence[str]], names: Sequence[str] | None
    ) -> Self:
        if names and len(names) != len(columns):
            raise ArgumentError(
                "class_names", f" needs a name for each of {', '.join(columns)}, got {list(names)}"
            )
        return cls(tuple(map(str, names or columns)))

    def cell_error(self, number: float) -> str | None:
        """What a cell must hold, if this number is wrong there; None: it is right."""
        return None

    def parse(self, labels: Mapping[str, str]) -> tuple[float, ...]:
        return tuple(self._parse(column, label) for column, label in labels.items())

    def _parse(self, column: str, label: str) -> float:
        number = finite_number(label)
        if number is None:
            raise ValueError(f"column {column!r} must hold a finite number, got {label!r}")
        rule = self.cell_error(number)
        if rule:
            raise ValueError(
                f"column {column!r} must hold {rule}, got {label!r}; target_type=regression takes any number"
            )
        return number
