"""Regions that may overlap: their targets, and what their values and order must fulfil."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from medconv.targets.regions import RegionTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError

IGNORE = "ignore"  # the name that a dataset.json gives to the value of unlabelled voxels
NamesAndTargets = tuple[tuple[str, ...], SegmentationTargets]  # class names with the background first

Regions = dict[str, tuple[int, ...]]  # name to its label values


@dataclass(frozen=True)
class Source:
    """Where regions and their order are given, for messages: by arguments, or by keys of a file."""

    regions: str = "regions"
    order: str = "regions_order"
    path: Path | None = None

    def error(self, name: str, problem: str) -> ValueError:
        """Args: name: `regions` or `order` of this source."""
        if self.path is None:
            return ArgumentError(name, problem)
        return ValueError(f"{self.path}: {name}{problem}")


def region_targets(
    regions: Regions, order: Any, names: tuple[str, ...], ignore: int | None, source: Source
) -> SegmentationTargets:
    check_values(regions, names, ignore, source, source.regions)
    if order is None:
        _check_disjoint(regions, source)
        order = [values[0] for values in regions.values()]
    if not _is_order_of(order, regions):
        raise source.error(
            source.order,
            f" must give each of {list(regions)} a label value of its own, one that lies in it, got {order}",
        )
    return RegionTargets(
        names=tuple(regions),
        values=tuple(regions.values()),
        ignore=ignore,
        order=tuple(int(value) for value in order),
    )


def _check_disjoint(regions: Regions, source: Source) -> None:
    for first, second in combinations(regions, 2):
        if set(regions[first]) & set(regions[second]):
            raise source.error(
                source.order,
                f" is needed, as {first} and {second} overlap: for each of {list(regions)} the label value "
                "that it writes into a prediction, later ones over earlier ones",
            )


def _is_order_of(order: Any, regions: Regions) -> bool:
    """Whether an order has a different value of each region."""
    if not isinstance(order, Sequence):
        return False
    if not all(type(value) is int for value in order):
        return False
    if len(order) != len(regions) or len(set(order)) < len(order):
        return False
    pairs = zip(order, regions.values(), strict=True)
    return all(value in region for value, region in pairs)


def check_values(
    regions: Regions, names: Sequence[str], ignore: int | None, source: Source, name: str
) -> None:
    last = len(names) - 1
    for region, values in regions.items():
        invalid = [value for value in values if not 0 < value <= last]
        if values and not invalid and len(set(values)) == len(values):
            continue
        if invalid:
            reason = "the value to ignore" if ignore in invalid else "not a foreground value"
            detail = f"{invalid[0]} is {reason}"
        else:
            detail = f"got {list(values)}"
        problem = f": {region} must name different label values from 1 to {last}: {detail}"
        raise source.error(name, problem)
    if ignore is not None and ignore <= last:
        raise source.error(
            name, f": the value to ignore must be above all classes, 0 to {last}, got {ignore}"
        )
