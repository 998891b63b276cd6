"""Targets of a dataset with other regions, another order of them or another value to ignore."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from medconv.targets.base import HIGHEST, names_of
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.region_checks import IGNORE, NamesAndTargets, Source, check_values, region_targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import Argument, ArgumentError


def _region_values(region: str, members: Any, names: Sequence[str]) -> tuple[int, ...]:
    """The label values of a region of the config: a class or a list of classes, each by value or name."""
    if not isinstance(members, Sequence) or isinstance(members, str):
        members = [members]
    values = []
    for member in members:
        is_value = type(member) is int
        values.append(member if is_value else _value_of(member, names, "regions", f"{region}: "))
    return tuple(values)


def _value_of(name: Any, names: Sequence[str], argument: str, location: str = "") -> int:
    if name in names:
        return list(names).index(name)
    near = difflib.get_close_matches(str(name), names[1:], n=1)
    hint = f"did you mean {near[0]}?" if near else f"the classes are {', '.join(names[1:])}"
    raise ArgumentError(argument, f": {location}{name} is not a class; {hint}")


def _drop_ignored(names: tuple[str, ...], ignore: Any) -> tuple[tuple[str, ...], int]:
    """The remaining classes, and the value to ignore."""
    value = ignore if type(ignore) is int else _value_of(ignore, names, "ignore_label")
    last = len(names) - 1
    # at least one foreground class remains
    if not max(2, last) <= value <= HIGHEST:
        meaning = f"class {names[value]}" if 0 <= value <= last else "not a label value"
        lowest = f"{last} ({names[last]}, which is then not a class)" if last >= 2 else "2"
        raise ArgumentError(
            "ignore_label", f" must be above all classes, from {lowest} to {HIGHEST}, got {ignore}, {meaning}"
        )
    return names[:-1] if value == last else names, value


def override(
    names: Sequence[str],
    targets: SegmentationTargets,
    regions: Mapping[str, Any] | None,
    regions_order: Sequence[int] | None,
    ignore_label: Any,
) -> NamesAndTargets:
    """Class names and targets of a dataset after other regions, another order of them and another
    value to ignore; None of all three keeps what the dataset declares.

    Args:
        names: what the dataset declares, with the background first.
        targets: what the dataset declares.
        regions: name to a class or a list of classes, each by value or by name.
        regions_order: the label value that each region writes, later over earlier.
        ignore_label: a value above all classes; or the name or value of the last class, which is then no
            class; or a list of such a value and of further ones.
    Raises:
        ArgumentError: names the invalid argument.
    """
    if isinstance(ignore_label, (list, tuple)):
        first, *further = ignore_label or [None]
        names, targets = override(names, targets, regions, regions_order, first)
        _check_also_ignored(further, names, targets.ignore, ignore_label)
        return names, replace(targets, also_ignored=tuple(further))
    names = names_of(names)
    ignore = targets.ignore
    keeps_declared = ignore_label is None or (ignore_label == IGNORE and ignore is not None)
    if not keeps_declared:
        names, ignore = _drop_ignored(names, ignore_label)
    if regions:
        values = {name: _region_values(name, members, names) for name, members in regions.items()}
        return names, region_targets(values, regions_order, names, ignore, Source())
    if regions_order:
        raise ArgumentError(
            "regions_order", f"={list(regions_order)} needs ", Argument("regions"), ", which is not set"
        )
    if not targets.exclusive:
        check_values(targets.by_name, names, ignore, Source(), "ignore_label")
        return names, replace(targets, ignore=ignore)
    return names, LabelMapTargets.of_classes(names, ignore)


def _check_also_ignored(
    further: Sequence[Any], names: Sequence[str], ignore: int | None, ignore_label: Any
) -> None:
    are_valid = all(type(value) is int and len(names) <= value <= HIGHEST for value in further)
    # checked last, as only whole numbers are certain to go into a set
    if ignore is None or not are_valid or len({*further, ignore}) <= len(further):
        raise ArgumentError(
            "ignore_label",
            " must be one value, or a list of different values above all classes, from "
            f"{len(names)} to {HIGHEST}, got {ignore_label}",
        )
