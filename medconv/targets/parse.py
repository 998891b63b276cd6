"""What label values mean: classes, regions that may overlap, and the value of voxels of which nothing is
known.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from medconv.targets.segmentation import HIGHEST, SegmentationTargets

IGNORE = "ignore"  # the name by which a dataset.json marks that value
Regions = dict[str, tuple[int, ...]]


def declared(labels: Any, order: Any, path: Path) -> tuple[tuple[str, ...], SegmentationTargets]:
    """The class names, background first, and the targets that a dataset.json declares.

    Decathlon has {"0": "background"}, nnU-Net v2 {"background": 0}, where a name may have several values and
    so be a region.
    Args: order: what `regions_class_order` says, None where it is absent.
    Raises: ValueError: values that leave a gap, or regions without an order.
    """
    if not isinstance(labels, dict) or len(labels) < 2:
        raise ValueError(
            f"{path}: key `labels` must name the background and at least one class, got {labels!r}"
        )
    groups = _groups(labels, path)
    if high := {name: max(values) for name, values in groups.items() if max(values) > HIGHEST}:
        raise ValueError(f"{path}: label values must lie in 0 to {HIGHEST}, got {high}")
    unknown = groups.pop(IGNORE, (None,))[0]
    if any(len(values) > 1 for values in groups.values()):
        return _declared_regions(groups, unknown, order, path)
    pairs = sorted((values[0], name) for name, values in groups.items())
    found, names = [value for value, _ in pairs], tuple(name for _, name in pairs)
    if found != list(range(len(found))):
        raise ValueError(
            f"{path}: label values must be 0, 1, 2, ... without a gap and each once, got {found}"
        )
    if unknown is not None and (unknown < len(names) or len(names) < 2):
        raise ValueError(
            f"{path}: `{IGNORE}` must be above all classes, 0 to {len(names) - 1}, got {unknown}"
        )
    return names, SegmentationTargets.of_classes(names, unknown)


def _groups(labels: dict[str, Any], path: Path) -> Regions:
    """Name to the values it stands for."""
    if all(str(key).isdecimal() for key in labels):
        names = [str(name) for _, name in sorted(labels.items(), key=lambda pair: int(pair[0]))]
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: `labels` must give every class a name of its own, got {names}")
        return {str(name): (int(value),) for value, name in labels.items()}
    lists = {name: value if isinstance(value, list) else [value] for name, value in labels.items()}
    odd = [
        name for name, values in lists.items() if not values or not all(str(v).isdecimal() for v in values)
    ]
    if odd or len(lists.get(IGNORE, [0])) > 1:
        got = {name: labels[name] for name in odd or [IGNORE]}
        raise ValueError(
            f"{path}: `labels` must give each name a label value, or for a region a list of them, got {got}"
        )
    return {name: tuple(int(v) for v in values) for name, values in lists.items()}


def _declared_regions(
    groups: Regions, unknown: int | None, order: Any, path: Path
) -> tuple[tuple[str, ...], SegmentationTargets]:
    regions = {name: values for name, values in groups.items() if values != (0,)}
    alone = {values[0]: name for name, values in groups.items() if len(values) == 1}
    highest = max(max(values) for values in regions.values())
    names = tuple(
        alone.get(value, f"label {value}" if value else "background") for value in range(highest + 1)
    )
    if order is None:
        raise ValueError(
            f"{path}: regions need the key `regions_class_order`, one label value for each of {list(regions)}"
        )
    return names, _of_regions(
        regions, order, names, unknown, f"{path}: labels", f"{path}: regions_class_order"
    )


def _of_regions(
    regions: Regions,
    order: Any,
    names: tuple[str, ...],
    unknown: int | None,
    key: str,
    order_key: str = "data.regions_order",
) -> SegmentationTargets:
    _check_values(regions, names, unknown, key)
    if order is None:
        shared = [f"{a} and {b}" for a, b in combinations(regions, 2) if set(regions[a]) & set(regions[b])]
        if shared:
            raise ValueError(
                f"{order_key} is needed, as {shared[0]} overlap: for each of {list(regions)} the label "
                "value that it writes into a prediction, later ones over earlier ones"
            )
        order = [values[0] for values in regions.values()]
    fits = (
        isinstance(order, Sequence)
        and len(order) == len(regions)
        and all(type(value) is int for value in order)
    )
    if (
        not fits
        or len(set(order)) < len(order)
        or any(v not in r for v, r in zip(order, regions.values(), strict=True))
    ):
        raise ValueError(
            f"{order_key} must give each of {list(regions)} a label value of its own, one that lies in it, "
            f"got {order}"
        )
    return SegmentationTargets(tuple(regions), tuple(regions.values()), tuple(int(v) for v in order), unknown)


def _check_values(regions: Regions, names: Sequence[str], unknown: int | None, key: str) -> None:
    for region, values in regions.items():
        wrong = [v for v in values if not 0 < v < len(names)]
        if not values or wrong or len(set(values)) < len(values):
            is_ = (
                "the value to ignore, which is in no region"
                if unknown in wrong
                else "none of the foreground's"
            )
            told = f"{wrong[0]} is {is_}" if wrong else f"got {list(values)}"
            raise ValueError(
                f"{key}: {region} must name different label values of 1 to {len(names) - 1}: {told}"
            )
    if unknown is not None and unknown < len(names):
        raise ValueError(
            f"{key}: the value to ignore must be above all classes, 0 to {len(names) - 1}, got {unknown}"
        )


def _values(region: str, members: Any, names: Sequence[str]) -> tuple[int, ...]:
    listed = members if isinstance(members, Sequence) and not isinstance(members, str) else [members]
    return tuple(
        member if type(member) is int else _value_of(member, names, f"data.regions: {region}")
        for member in listed
    )


def _value_of(name: Any, names: Sequence[str], key: str) -> int:
    if name in names:
        return list(names).index(name)
    near = difflib.get_close_matches(str(name), names[1:], n=1)
    hint = f"did you mean {near[0]}?" if near else f"the classes are {', '.join(names[1:])}"
    raise ValueError(f"{key}: {name} is no class; {hint}")


def _without(names: tuple[str, ...], ignore: Any) -> tuple[tuple[str, ...], int]:
    """The classes that are left, and the value to ignore."""
    value = ignore if type(ignore) is int else _value_of(ignore, names, "data.ignore_label")
    last = len(names) - 1
    if not max(2, last) <= value <= HIGHEST:
        named = f"class {names[value]}" if 0 <= value <= last else "no label value"
        least = f"{last} ({names[last]}, which then is no class)" if last >= 2 else "2"
        raise ValueError(
            f"data.ignore_label must be above all classes, from {least} to {HIGHEST}, got {ignore}, {named}"
        )
    return (names[:-1] if value == last else names), value
