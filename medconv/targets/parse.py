"""Segmentation targets from a dataset.json or from the config: classes, overlapping regions, ignore label."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from medconv.targets.base import HIGHEST, names_of
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import Argument, ArgumentError

log = logging.getLogger(__name__)
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
        for first, second in combinations(regions, 2):
            if set(regions[first]) & set(regions[second]):
                raise source.error(
                    source.order,
                    f" is needed, as {first} and {second} overlap: for each of {list(regions)} the label "
                    "value that it writes into a prediction, later ones over earlier ones",
                )
        order = [values[0] for values in regions.values()]
    if not _is_order_of(order, regions):
        raise source.error(
            source.order,
            f" must give each of {list(regions)} a label value of its own, one that lies in it, got {order}",
        )
    _check_come_back(regions, order, source)
    return RegionTargets(
        names=tuple(regions),
        values=tuple(regions.values()),
        ignore=ignore,
        order=tuple(int(value) for value in order),
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


def _check_come_back(regions: Regions, order: Sequence[int], source: Source) -> None:
    """What regions write is again in them; a warning of those of which a part is not.

    Raises: ValueError: a region is nowhere in a label map, even where the prediction is perfect.
    """
    written: dict[int, int] = {}  # by label value; later regions write over earlier ones
    for value, values in zip(order, regions.values(), strict=True):
        written |= dict.fromkeys(values, value)
    for name, values in regions.items():
        lost = [value for value in values if written[value] not in values]
        problem = f" {list(order)} of {list(regions)} writes over {name}"
        if len(lost) == len(values):
            raise source.error(
                source.order,
                f":{problem} wherever it is, so that no prediction has it; name large regions first, those "
                "within them after them",
            )
        if lost:
            log.warning(
                "%s:%s where the label value is %s: there it is missing in predictions and their scores",
                source.path or source.order,
                problem,
                " or ".join(map(str, lost)),
            )


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


def parse_labels(meta: Mapping[str, Any], path: Path) -> NamesAndTargets:
    """The class names, background first, and the targets of a dataset.json.

    Decathlon writes {"0": "background"}, nnU-Net v2 {"background": 0}; there a name with several values is a
    region.

    Raises:
        ValueError: label values with a gap, or regions without an order.
    """
    labels = meta.get("labels")
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
        return _parse_regions(groups, ignore, meta.get("regions_class_order"), path)
    # classes that exclude each other, sorted by value, as a file may list them in any order
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


def _label_groups(labels: dict[str, Any], path: Path) -> Regions:
    """Name to its label values, of either format."""
    if all(str(key).isdecimal() for key in labels):
        # of the decathlon, {"0": "background", "1": "liver"}
        in_order = sorted(labels.items(), key=lambda pair: int(pair[0]))
        names = [str(name) for _, name in in_order]
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: `labels` must give every class a different name, got {names}")
        return {str(name): (int(value),) for value, name in labels.items()}
    lists = {}
    for name, value in labels.items():
        lists[name] = value if isinstance(value, list) else [value]
    invalid = []
    for name, values in lists.items():
        if not values or not all(str(value).isdecimal() for value in values):
            invalid.append(name)
    if not invalid and len(lists.get(IGNORE, [0])) > 1:
        invalid = [IGNORE]
    if invalid:
        invalid_labels = {name: labels[name] for name in invalid}
        raise ValueError(
            f"{path}: `labels` must give each name a label value, or for a region a list of them, got "
            f"{invalid_labels}"
        )
    return {name: tuple(map(int, values)) for name, values in lists.items()}


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
