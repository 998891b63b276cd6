"""The targets of a dataset as the config changes them: regions and the ignore label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from medconv.data.case import Dataset
from medconv.targets.parse import IGNORE, _check_values, _of_regions, _values, _without
from medconv.targets.segmentation import SegmentationTargets, names_of


def asked(
    dataset: Dataset, regions: Mapping[str, Any] | None, order: Sequence[int] | None, ignore: Any
) -> Dataset:
    """The same dataset with the targets that a config asks for: `data.regions`, `data.regions_order`,
    `data.ignore_label`.

    Args: regions: name to a class, or a list of classes, by value or by name. ignore: a value above all
        classes, or the name or value of the last one, which then is none. None of all three: what the dataset
        itself says.
    Raises: ValueError: names the key at fault.
    """
    names, unknown = names_of(dataset.class_names), dataset.targets.ignore
    if ignore is not None and not (ignore == IGNORE and unknown is not None):
        names, unknown = _without(names, ignore)
    if regions:
        targets = _of_regions(
            {n: _values(n, v, names) for n, v in regions.items()}, order, names, unknown, "data.regions"
        )
    elif order:
        raise ValueError(f"data.regions_order={list(order)} needs data.regions, which is not set")
    elif dataset.targets.overlapping:
        targets = replace(dataset.targets, ignore=unknown)
        _check_values(targets.by_name, names, unknown, "data.ignore_label")
    else:
        targets = SegmentationTargets.of_classes(names, unknown)
    return replace(dataset, class_names=names, wanted=targets)
