"""Segmentation targets from a dataset.json or from the config: classes, overlapping regions, ignore label."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from medconv.targets.base import HIGHEST, names_of
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.targets.segmentation import SegmentationTargets

IGNORE = "ignore"  # the name that a dataset.json gives to the value of unlabelled voxels
Regions = dict[str, tuple[int, ...]]


def parse_labels(labels: Any, order: Any, path: Path) -> tuple[tuple[str, ...], SegmentationTargets]:
    """The class names, background first, and the targets of a dataset.json.

    Decathlon writes {"0": "background"}, nnU-Net v2 {"background": 0}; there a name with several values is a
    region.
    Args: order: the value of `regions_class_order`; None if absent.
    Raises: ValueError: label values with a gap, or regions without an order.
    """
    if not isinstance(labels, dict) or len(labels) < 2:
        raise ValueError(
            f"{path}: key `labels` must name the background and at least one class, got {labels!r}"
        )
    groups = _groups(labels, path)
    if high := {name: max(values) for name, values in groups.items() if max(values) > HIGHEST}:
        raise ValueError(f"{path}: label values must lie in 0 to {HIGHEST}, got {high}")
    ignore = groups.pop(IGNORE, (None,))[0]
    if any(len(values) > 1 for values in groups.values()):
        return _parse_regions(groups, ignore, order, path)
    pairs = sorted((values[0], name) for name, values in groups.items())
    values, names = [value for value, _ in pairs], tuple(name for _, name in pairs)
    if values != list(range(len(values))):
        raise ValueError(
            f"{path}: label values must be 0, 1, 2, ... without a gap and each once, got {values}"
        )
    if ignore is not None and (ignore < len(names) or len(names) < 2):
        raise ValueError(f"{path}: `{IGNORE}` must be above all classes, 0 to {len(names) - 1}, got {ignore}")
    return names, LabelMapTargets.of_classes(names, ignore)


def _groups(labels: dict[str, Any], path: Path) -> Regions:
    """Name to its label values."""
    if all(str(key).isdecimal() for key in labels):
        names = [str(name) for _, name in sorted(labels.items(), key=lambda pair: int(pair[0]))]
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: `labels` must give every class a name of its own, got {names}")
        return {str(name): (int(value),) for value, name in labels.items()}
    lists = {name: value if isinstance(value, list) else [value] for name, value in labels.items()}
    invalid = [n for n, values in lists.items() if not values or not all(str(v).isdecimal() for v in values)]
    if invalid or len(lists.get(IGNORE, [0])) > 1:
        got = {name: labels[name] for name in invalid or [IGNORE]}
        raise ValueError(
            f"{path}: `labels` must give each name a label value, or for a region a list of them, got {got}"
        )
    return {name: tuple(int(v) for v in values) for name, values in lists.items()}


def _parse_regions(
    groups: Regions, ignore: int | None, order: Any, path: Path
) -> tuple[tuple[str, ...], SegmentationTargets]:
    regions = {name: values for name, values in groups.items() if values != (0,)}
    single = {values[0]: name for name, values in groups.items() if len(values) == 1}
    highest = max(max(values) for values in regions.values())
    names = tuple(single.get(v, f"label {v}" if v else "background") for v in range(highest + 1))
    if order is None:
        raise ValueError(
            f"{path}: regions need the key `regions_class_order`, one label value for each of {list(regions)}"
        )
    keys = f"{path}: labels", f"{path}: regions_class_order"
    return names, _region_targets(regions, order, names, ignore, *keys)


def _region_targets(
    regions: Regions,
    order: Any,
    names: tuple[str, ...],
    ignore: int | None,
    key: str,
    order_key: str = "data.regions_order",
) -> SegmentationTargets:
    _check_values(regions, names, ignore, key)
    if order is None:
        shared = [f"{a} and {b}" for a, b in combinations(regions, 2) if set(regions[a]) & set(regions[b])]
        if shared:
            raise ValueError(
                f"{order_key} is needed, as {shared[0]} overlap: for each of {list(regions)} the label "
                "value that it writes into a prediction, later ones over earlier ones"
            )
        order = [values[0] for values in regions.values()]
    valid = (
        isinstance(order, Sequence)
        and all(type(value) is int for value in order)
        and len(set(order)) == len(order) == len(regions)
        and all(value in region for value, region in zip(order, regions.values(), strict=True))
    )
    if not valid:
        raise ValueError(
            f"{order_key} must give each of {list(regions)} a label value of its own, one that lies in it, "
            f"got {order}"
        )
    return RegionTargets(tuple(regions), tuple(regions.values()), ignore, tuple(int(v) for v in order))


def _check_values(regions: Regions, names: Sequence[str], ignore: int | None, key: str) -> None:
    for region, values in regions.items():
        wrong = [v for v in values if not 0 < v < len(names)]
        if not values or wrong or len(set(values)) < len(values):
            what = "the value to ignore" if ignore in wrong else "not a foreground value"
            detail = f"{wrong[0]} is {what}" if wrong else f"got {list(values)}"
            raise ValueError(
                f"{key}: {region} must name different label values from 1 to {len(names) - 1}: {detail}"
            )
    if ignore is not None and ignore < len(names):
        raise ValueError(
            f"{key}: the value to ignore must be above all classes, 0 to {len(names) - 1}, got {ignore}"
        )


def _values(region: str, members: Any, names: Sequence[str]) -> tuple[int, ...]:
    listed = members if isinstance(members, Sequence) and not isinstance(members, str) else [members]
    key = f"data.regions: {region}"
    return tuple(m if type(m) is int else _value_of(m, names, key) for m in listed)


def _value_of(name: Any, names: Sequence[str], key: str) -> int:
    if name in names:
        return list(names).index(name)
    near = difflib.get_close_matches(str(name), names[1:], n=1)
    hint = f"did you mean {near[0]}?" if near else f"the classes are {', '.join(names[1:])}"
    raise ValueError(f"{key}: {name} is not a class; {hint}")


def _drop_ignored(names: tuple[str, ...], ignore: Any) -> tuple[tuple[str, ...], int]:
    """The remaining classes, and the value to ignore."""
    value = ignore if type(ignore) is int else _value_of(ignore, names, "data.ignore_label")
    last = len(names) - 1
    if not max(2, last) <= value <= HIGHEST:
        named = f"class {names[value]}" if 0 <= value <= last else "not a label value"
        least = f"{last} ({names[last]}, which is then not a class)" if last >= 2 else "2"
        raise ValueError(
            f"data.ignore_label must be above all classes, from {least} to {HIGHEST}, got {ignore}, {named}"
        )
    return (names[:-1] if value == last else names), value


def override(
    names: Sequence[str],
    targets: SegmentationTargets,
    regions: Mapping[str, Any] | None,
    regions_order: Sequence[int] | None,
    ignore_label: Any,
) -> tuple[tuple[str, ...], SegmentationTargets]:
    """Class names and targets of a dataset after the config's `data.regions`, `data.regions_order` and
    `data.ignore_label`; None of all three keeps what the dataset declares.

    Args:
        names, targets: what the dataset declares; names with the background first.
        regions: name to a class or a list of classes, each by value or by name.
        ignore_label: a value above all classes; or the name or value of the last class, which is then no
            class; or a list of such a value and of further ones.
    Raises: ValueError: names the invalid key.
    """
    if isinstance(ignore_label, (list, tuple)):
        first, *also = ignore_label or [None]
        names, targets = override(names, targets, regions, regions_order, first)
        valid = all(type(value) is int and len(names) <= value <= HIGHEST for value in also)
        if targets.ignore is None or not valid or len({*also, targets.ignore}) <= len(also):
            what = f"different values above all classes, from {len(names)} to {HIGHEST}"
            raise ValueError(f"data.ignore_label must be one value, or a list of {what}, got {ignore_label}")
        return names, replace(targets, also_ignored=tuple(also))
    names, ignored_value = names_of(names), targets.ignore
    if ignore_label is not None and not (ignore_label == IGNORE and ignored_value is not None):
        names, ignored_value = _drop_ignored(names, ignore_label)
    if regions:
        values = {name: _values(name, classes, names) for name, classes in regions.items()}
        return names, _region_targets(values, regions_order, names, ignored_value, "data.regions")
    if regions_order:
        raise ValueError(f"data.regions_order={list(regions_order)} needs data.regions, which is not set")
    if not targets.exclusive:
        _check_values(targets.by_name, names, ignored_value, "data.ignore_label")
        return names, replace(targets, ignore=ignored_value)
    return names, LabelMapTargets.of_classes(names, ignored_value)
