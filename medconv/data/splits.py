"""Which cases are trained on, validated on and kept for a test: as the dataset says, else by folds."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from medconv.data.case import Case
from medconv.data.datasets.common import _read_json
from medconv.targets.image_level import ImageLevelTargets

_NAMED = 20  # cases in one line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSplit:
    """Args: test: never seen in training."""

    train: list[Case]
    val: list[Case]
    test: list[Case]


def divide(cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None) -> DataSplit:
    """The parts that the cases name; where none is for validation, or none is named, a fold is.

    Raises: ValueError: as `split`, or a group in two parts.
    """
    named: dict[str, list[Case]] = {
        part: [case for case in cases if case.part == part] for part in ("train", "val", "test", "")
    }
    rest = [*named["train"], *named[""]]
    if not named["val"] or fold == "all" or splits is not None:
        parts = DataSplit(*split([*rest, *named["val"]], fold, num_folds, splits), named["test"])
    else:
        parts = DataSplit(rest, named["val"], named["test"])
        if str(fold) != "0":
            log.warning(
                "data.fold=%s is not used: the dataset says itself what is for training and for validation",
                fold,
            )
    _check_groups(parts)
    return parts


def without(parts: DataSplit, skipped: Mapping[str, str]) -> DataSplit:
    """Less some cases, by id."""
    return DataSplit(
        *([case for case in part if case.id not in skipped] for part in (parts.train, parts.val, parts.test))
    )


def without_copies(parts: DataSplit, contents: Mapping[str, str]) -> DataSplit:
    """Less those training cases whose image is also one of validation or test; a warning names them.

    Args: contents: case id to a hash of its voxels.
    """
    elsewhere = {contents[case.id]: case.id for case in [*parts.test, *parts.val] if case.id in contents}
    copies = {c.id: elsewhere[contents[c.id]] for c in parts.train if contents.get(c.id) in elsewhere}
    if not copies:
        return parts
    pairs = [f"{case} ({other})" for case, other in list(copies.items())[:_NAMED]]
    more = f" and {len(copies) - _NAMED} more" if len(copies) > _NAMED else ""
    log.warning(
        "%d images are both in training and in validation or test, and are left out of training: %s%s",
        len(copies),
        ", ".join(pairs),
        more,
    )
    return replace(parts, train=[case for case in parts.train if case.id not in copies])


def check_examples(parts: DataSplit, image_targets: ImageLevelTargets) -> None:
    """Raises: ValueError: a class or finding without an example in training, a class without one in
    validation, or no finding there that some cases have and others have not."""
    if image_targets.kind == "regression":
        return
    for part, cases in (("training", parts.train), ("validation", parts.val)):
        counts = class_counts(cases, image_targets)
        lacking = [n for n, count in zip(image_targets.names, counts, strict=True) if not count]
        if (
            part == "validation"
            and image_targets.kind == "multilabel"
            and cases
            and not any(0 < n < len(cases) for n in counts)
        ):
            raise ValueError(
                "no finding has validation cases with it and without it, so there is no AUC to choose a "
                "checkpoint by; other data.fold or data.num_folds may help"
            )
        if part == "validation" and image_targets.kind == "multilabel" and cases and lacking:
            log.warning("no case of validation has %s, which has no score there", ", ".join(lacking))
        elif cases and lacking:
            raise ValueError(
                f"no case of {part} has class {', '.join(lacking)}, expected at least one of each; other "
                "data.fold or data.num_folds, or data.class_names without it, may help"
            )


def class_counts(cases: Sequence[Case], image_targets: ImageLevelTargets) -> list[int]:
    """How many cases have each class or finding."""
    values = np.array([case.values for case in cases]).reshape(len(cases), image_targets.num_values)
    if image_targets.kind == "multiclass":
        return [int((values == index).sum()) for index in range(len(image_targets.names))]
    return [int(count) for count in (values == 1).sum(0)]


def members(cases: Sequence[Case], image_targets: ImageLevelTargets) -> list[list[int]]:
    """The places of the cases of each class; of findings, of those that have it, and at last of those
    without any.
    """
    values = [case.values or () for case in cases]
    if image_targets.kind == "multiclass":
        return [
            [i for i, v in enumerate(values) if v[0] == index] for index in range(len(image_targets.names))
        ]
    found = [[i for i, v in enumerate(values) if v[index]] for index in range(len(image_targets.names))]
    return [*found, [i for i, v in enumerate(values) if not any(v)]]


def _check_groups(parts: DataSplit) -> None:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, cases in (("training", parts.train), ("validation", parts.val), ("test", parts.test)):
        for case in cases:
            if case.group:
                found[case.group].setdefault(name, case.id)
    for group, where in found.items():
        if len(where) > 1:
            told = ", ".join(f"{case} in {name}" for name, case in where.items())
            raise ValueError(
                f"group {group} is in more than one part: {told}; expected all of its cases in one"
            )


def split(
    cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None
) -> tuple[list[Case], list[Case]]:
    """Training and validation cases of a fold; fold `all` trains on every case and validates on none.

    Sorted case ids, shuffled once with seed 12345 and cut into `num_folds`: the split of nnU-Net, so that
    fold k means the same cases there and here. A group takes the place of its cases' ids.
    Args: splits: a `splits_final.json` (list of {"train": ids, "val": ids}) that takes the place of the rule.
    """
    ordered = sorted(cases, key=lambda case: case.id)
    units = sorted({case.group or case.id for case in ordered})
    if fold == "all":
        return ordered, []
    number = int(fold) if str(fold).isdecimal() else -1
    if splits is not None:
        return _from_file(ordered, number, splits)
    if not 2 <= num_folds <= len(units):
        what = "groups" if any(case.group for case in ordered) else "cases"
        raise ValueError(
            f"data.num_folds must lie between 2 and the number of {what}, {len(units)}, got {num_folds}"
        )
    if not 0 <= number < num_folds:
        raise ValueError(f"data.fold must be `all` or lie in 0..{num_folds - 1}, got {fold}")
    shuffled = np.arange(len(units))
    np.random.RandomState(12345).shuffle(shuffled)
    held_out = {units[i] for i in np.array_split(shuffled, num_folds)[number]}
    return (
        [case for case in ordered if (case.group or case.id) not in held_out],
        [case for case in ordered if (case.group or case.id) in held_out],
    )


def _from_file(cases: Sequence[Case], fold: int, path: Path) -> tuple[list[Case], list[Case]]:
    folds = _read_json(path)
    if not isinstance(folds, list) or not all(
        isinstance(f, dict) and {"train", "val"} <= set(f) for f in folds
    ):
        raise ValueError(f"{path}: expected a list of folds, each with the keys `train` and `val`")
    if not 0 <= fold < len(folds):
        raise ValueError(f"{path}: data.fold must be `all` or lie in 0..{len(folds) - 1}, got {fold}")
    by_id = {case.id: case for case in cases}
    train, val = folds[fold]["train"], folds[fold]["val"]
    unknown = sorted({*train, *val} - set(by_id))
    if unknown or set(train) & set(val):
        raise ValueError(
            f"{path}: unknown cases {unknown[:20]}, cases in both parts {sorted(set(train) & set(val))[:20]}"
        )
    return [by_id[case] for case in train], [by_id[case] for case in val]
