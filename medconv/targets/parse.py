"""Segmentation targets from a dataset.json or from the config: classes, overlapping regions, ignore label."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medconv.targets.base import HIGHEST
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.region_checks import IGNORE, NamesAndTargets, Regions, Source, region_targets


def parse_labels(labels: Any, order: Any, path: Path) -> NamesAndTargets:
    """The class names, background first, and the targets of a dataset.json.

    Decathlon writes {"0": "background"}, nnU-Net v2 {"background": 0}; there a name with several values is a
    region.

    Args:
        labels: the value of `labels`.
        order: the value of `regions_class_order`; None if absent.
        path: of the file, for messages.
    Raises:
        ValueError: label values with a gap, or regions without an order.
    """
    if not isinstance(labels, dict) or len(labels) < 2:
        raise ValueError(
            f"{path}: key `labels` must name the background and at least one class, got {labels!r}"
        )
    groups = _label_groups(labels, path)
    highest = {name: max(values) for name, values in groups.items()}
    too_high = {name: value for name, value in highest.items() if value > HIGHEST}
    if too_high:
        raise ValueError(f"{path}: label values must lie in 0 to {HIGHEST}, got {too_high}")
    # not a class: it has a value, but no output
    ignore = groups.pop(IGNORE, (None,))[0]
    if any(len(values) > 1 for values in groups.values()):
        return _parse_regions(groups, ignore, order, path)
    return _parse_classes(groups, ignore, path)


def _label_groups(labels: dict[str, Any], path: Path) -> Regions:
    """Name to its label values, of either format."""
    if all(str(key).isdecimal() for key in labels):
        return _decathlon_groups(labels, path)
    lists = {}
    for name, value in labels.items():
        lists[name] = value if isinstance(value, list) else [value]
    invalid = [name for name, values in lists.items() if not _are_label_values(values)]
    if not invalid and len(lists.get(IGNORE, [0])) > 1:
        invalid = [IGNORE]
    if invalid:
        invalid_labels = {name: labels[name] for name in invalid}
        raise ValueError(
            f"{path}: `labels` must give each name a label value, or for a region a list of them, got "
            f"{invalid_labels}"
        )
    return {name: tuple(map(int, values)) for name, values in lists.items()}


def _decathlon_groups(labels: dict[str, Any], path: Path) -> Regions:
    """Of {"0": "background", "1": "liver"}."""
    in_order = sorted(labels.items(), key=lambda pair: int(pair[0]))
    names = [str(name) for _, name in in_order]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: `labels` must give every class a different name, got {names}")
    return {str(name): (int(value),) for value, name in labels.items()}


def _are_label_values(values: Sequence[Any]) -> bool:
    return bool(values) and all(str(value).isdecimal() for value in values)


def _parse_classes(groups: Regions, ignore: int | None, path: Path) -> NamesAndTargets:
    """Classes that exclude each other."""
    # sorted by value, as a file may list them in any order
    pairs = sorted((group[0], name) for name, group in groups.items())
    values = [value for value, _ in pairs]
    names = tuple(name for _, name in pairs)
    if values != list(range(len(values))):
        raise ValueError(
            f"{path}: label values must be 0, 1, 2, ... without a gap and each once, got {values}"
        )
    if ignore is not None and (ignore < len(names) or len(names) < 2):
        raise ValueError(f"{path}: `{IGNORE}` must be above all classes, 0 to {len(names) - 1}, got {ignore}")
    return names, LabelMapTargets.of_classes(names, ignore)


def _parse_regions(groups: Regions, ignore: int | None, order: Any, path: Path) -> NamesAndTargets:
    """Regions that may overlap; a label value without a name of its own is called `label 3`."""
    regions = {name: values for name, values in groups.items() if values != (0,)}
    names_by_value = {values[0]: name for name, values in groups.items() if len(values) == 1}
    names_by_value.setdefault(0, "background")
    highest = max(max(values) for values in regions.values())
    names = tuple(names_by_value.get(value, f"label {value}") for value in range(highest + 1))
    if order is None:
        raise ValueError(
            f"{path}: regions need the key `regions_class_order`, one label value for each of {list(regions)}"
        )
    source = Source("labels", "regions_class_order", path)
    return names, region_targets(regions, order, names, ignore, source)
