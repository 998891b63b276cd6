"""Settings of `data` that may differ between cases: by patterns of case ids, such as `siteA_*`.

Errors name the setting: `source_spacing_mm`, `annotated`, `missing` or `case_weights`.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.io.formats import structures_of, without_structures
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some

log = logging.getLogger(__name__)
_KIND_GAP = 0.15  # of the range of all pictures, between two kinds
_FEWEST_OF_KIND = 3  # pictures


def with_source_spacing(dataset: Dataset, setting: Any) -> Dataset:
    """The dataset with a stated spacing in place of that of the headers.

    Args:
        setting: mm along right, anterior, superior, or {pattern: mm}.

    Raises:
        ArgumentError: not positive numbers, or as `by_case`.
    """
    check_source_spacing(setting)
    if isinstance(setting, Mapping):
        by_case(setting, dataset.case_ids, "source_spacing_mm")
    cases = [replace(case, source_spacing_mm=source_spacing(setting, case.id)) for case in dataset.cases]
    return replace(dataset, cases=tuple(cases))


def check_source_spacing(setting: Any) -> None:
    """Check a spacing that is stated in place of that of the headers.

    Args:
        setting: mm along right, anterior, superior, or {pattern: mm}.

    Raises:
        ArgumentError: neither two or three positive numbers nor a mapping of patterns to such numbers.
    """
    spacings = setting.values() if isinstance(setting, Mapping) else [setting]
    if not all(_is_spacing(spacing) for spacing in spacings):
        expected = "positive numbers of mm (right, anterior, superior), or {PATTERN: [...]} of case ids"
        raise ArgumentError("source_spacing_mm", f"={setting}: expected {expected}")


def source_spacing(setting: Any, case_id: str) -> tuple[float, ...] | None:
    """The spacing of a case by a checked setting; None: that of its headers."""
    spacing_mm = (
        setting_of(setting, case_id, "source_spacing_mm") if isinstance(setting, Mapping) else setting
    )
    if spacing_mm is None:
        return None
    return tuple(float(mm) for mm in spacing_mm)


def with_annotated(dataset: Dataset, setting: Any) -> Dataset:
    """The dataset with the annotated classes that a setting names for some of its cases.

    Args:
        setting: {pattern: class names}.

    Raises:
        ArgumentError: not {PATTERN: [classes]}, an unknown class, image-level targets, or as `by_case`.
    """
    if not dataset.targets.answers_classes:
        kind = dataset.targets.kind if dataset.targets.per_voxel else "image-level"
        raise ArgumentError("annotated", f" is for label maps of classes; this dataset has {kind} targets")
    foreground_names = dataset.class_names[1:]
    setting = _class_lists(setting, foreground_names)
    cases = list(dataset.cases)
    annotated_names = by_case(setting, dataset.case_ids, "annotated")
    for index, case in enumerate(cases):
        if case.id in annotated_names:
            # Label value 0 is the background, so the first foreground class is 1
            values = [1 + foreground_names.index(name) for name in annotated_names[case.id]]
            cases[index] = _with_annotated_values(case, tuple(sorted(values)))
    return replace(dataset, cases=tuple(cases))


def _class_lists(setting: Any, foreground_names: Sequence[str]) -> dict[str, list[str]]:
    """The names of each pattern; numbers are names of classes without others.

    Raises: ArgumentError: not a mapping of patterns to lists of these names.
    """
    is_valid = isinstance(setting, Mapping)
    lists: dict[str, list[str]] = {}
    if is_valid:
        for pattern, names in setting.items():
            is_list = isinstance(names, (list, tuple)) and len(names) > 0
            lists[pattern] = [str(name) for name in names] if is_list else []
            is_valid = is_valid and is_list and set(lists[pattern]) <= set(foreground_names)
    if not is_valid:
        expected = f"{{PATTERN: [classes]}} of case ids and of {', '.join(foreground_names)}"
        raise ArgumentError("annotated", f"={setting}: expected {expected}")
    return lists


def _with_annotated_values(case: Case, annotated: tuple[int, ...]) -> Case:
    """A case that annotates these label values.

    Its contours (RTSTRUCT) may lack the other structures, so these are not read.
    """
    if case.label is None:
        return replace(case, annotated=annotated)
    relabel = dict(case.relabel or ())
    file_values = range(1, 1 + len(structures_of(case.label)))
    not_annotated = [value for value in file_values if relabel.get(value, value) not in annotated]
    return replace(case, annotated=annotated, label=without_structures(case.label, not_annotated))


def check_annotated(train: Sequence[Case], dataset: Dataset, pairs: Sequence[tuple[int, int]]) -> None:
    """Check that training can learn every class from the cases that annotate it.

    Args:
        dataset: all cases, and the names of the classes.
        pairs: label values that a mirror exchanges.

    Raises:
        ArgumentError: a class that no training case annotates, or a case that annotates only one class of a
            pair.
    """
    class_names = dataset.class_names
    for value, name in enumerate(class_names[1:], start=1):
        if all(case.annotated is not None and value not in case.annotated for case in train):
            raise ArgumentError("annotated", f": no training case annotates {name}")
    for case in dataset.cases:
        if case.annotated is None:
            continue
        for left, right in pairs:
            if (left in case.annotated) != (right in case.annotated):
                names = f"{class_names[left]} and {class_names[right]}"
                raise ArgumentError(
                    "annotated",
                    f": case {case.id} annotates only one of {names}, which ",
                    Argument("flip_label_pairs"),
                    " exchanges",
                )


def with_missing_channels(dataset: Dataset) -> Dataset:
    """The dataset without the errors of cases that lack channels, if they may.

    Raises:
        ArgumentError: a channel that every case lacks.
    """
    lacking = [case for case in dataset.cases if case.missing_channels and case.images and case.label]
    for channel, name in enumerate(dataset.modalities):
        num_cases = sum(channel in case.missing_channels for case in lacking)
        if num_cases == len(dataset.cases):
            raise ArgumentError("missing", f"=allow: no case has the channel {name}")
        if num_cases:
            log.info("data: %d of %d cases lack %s (missing=allow)", num_cases, len(dataset.cases), name)
    ids = {case.id for case in lacking}
    errors = {case_id: error for case_id, error in dataset.errors.items() if case_id not in ids}
    return replace(dataset, errors=errors)


def with_weights(dataset: Dataset, setting: Any) -> Dataset:
    """The dataset with the sampling weights of a setting.

    Args:
        setting: {pattern: weight}.

    Raises:
        ArgumentError: not {PATTERN: a positive number}, or as `by_case`.
    """
    if not isinstance(setting, Mapping) or not all(_is_positive(weight) for weight in setting.values()):
        raise ArgumentError(
            "case_weights", f"={setting}: expected {{PATTERN: a positive number}} of case ids"
        )
    weights = by_case(setting, dataset.case_ids, "case_weights")
    return replace(dataset, cases=weighted(dataset.cases, weights))


def weighted(cases: Sequence[Case], weights: Mapping[str, float]) -> tuple[Case, ...]:
    """Cases with the weights of their ids; the others keep theirs."""
    return tuple(replace(case, weight=float(weights.get(case.id, case.weight))) for case in cases)


def kind_weights(percentiles: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """Sampling weights for pictures of several kinds, such as fluorescent and stained ones.

    Two pictures are of one kind unless a gap lies between them in how much their channels differ, or in
    brightness. A kind with a quarter of the pictures of the most frequent one is drawn half as often as it,
    where it would be a quarter. One or two pictures are no kind, since they may be faulty; their weight is 1.

    All cases count, so that all folds of a cross-validation have the same weights.

    Args:
        percentiles: of each channel, by case id, see `value_bands`.
    Returns:
        Case id to weight; empty: there is one kind.
    """
    values = {case: np.array(rows) for case, rows in percentiles.items()}
    lowest = min((rows.min() for rows in values.values()), default=0.0)
    width = max((rows.max() for rows in values.values()), default=0.0) - lowest
    if not width:
        return {}
    colour = {case: float(np.ptp(rows, axis=0).max()) / width for case, rows in values.items()}
    brightness = {case: float(rows.mean() - lowest) / width for case, rows in values.items()}
    kinds = [kind for alike in _parted(list(values), colour) for kind in _parted(alike, brightness)]
    usual = [kind for kind in kinds if len(kind) >= _FEWEST_OF_KIND]
    if len(usual) < 2:
        return {}
    weights = dict.fromkeys(values, 1.0)
    texts = []
    most = max(map(len, usual))
    for kind in usual:
        weights |= dict.fromkeys(kind, round((most / len(kind)) ** 0.5, 2))
        colours, light = (np.mean([measure[case] for case in kind]) for measure in (colour, brightness))
        name = "in colour" if colours > _KIND_GAP else "grey"
        texts.append(f"{len(kind)} {name}, brightness {light:.2f}")
    log.info("data: pictures of %d kinds (%s)", len(usual), "; ".join(texts))
    return weights


def _parted(cases: Sequence[str], measure: Mapping[str, float]) -> list[list[str]]:
    """The cases in the order of a measure, parted at its gaps."""
    parts: list[list[str]] = []
    for case in sorted(cases, key=measure.__getitem__):
        if not parts or measure[case] - measure[parts[-1][-1]] > _KIND_GAP:
            parts.append([])
        parts[-1].append(case)
    return parts


def by_case(setting: Mapping[str, Any], case_ids: Collection[str], name: str) -> dict[str, Any]:
    """Case id to the value of the pattern that it matches, for the cases that match one.

    Args:
        name: argument that gives the setting, for messages.

    Raises:
        ArgumentError: a pattern that no case matches, or a case that matches two.
    """
    values: dict[str, Any] = {}
    for case_id in case_ids:
        value = setting_of(setting, case_id, name)
        if value is not None:
            values[case_id] = value
    for pattern in setting:
        if not any(fnmatchcase(case_id, str(pattern)) for case_id in case_ids):
            raise ArgumentError(name, f": no case matches {pattern}; the ids are {some(list(case_ids))}")
    return values


def setting_of(setting: Mapping[str, Any], case_id: str, name: str) -> Any:
    """The value of the pattern that a case id matches; None: it matches none.

    Raises:
        ArgumentError: the case id matches two patterns.
    """
    matches = [pattern for pattern in setting if fnmatchcase(case_id, str(pattern))]
    if len(matches) > 1:
        raise ArgumentError(name, f": case {case_id} matches both {matches[0]} and {matches[1]}")
    return setting[matches[0]] if matches else None


def _is_spacing(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) not in (2, 3):
        return False
    return all(_is_positive(mm) for mm in value)


def _is_positive(value: Any) -> bool:
    # `type`, since True is an instance of int
    return type(value) in (int, float) and 0 < value < math.inf
