"""Settings of `data` that may differ between cases: by patterns of case ids, such as `siteA_*`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from medconv.config.values import ConfigError
from medconv.data.case import Case, Dataset
from medconv.data.io.rtstruct import structures_of, without
from medconv.utils.logging import some

_SPACING, _ANNOTATED, _WEIGHTS = "data.source_spacing_mm", "data.annotated", "data.case_weights"


def with_source_spacing(dataset: Dataset, setting: Any) -> Dataset:
    """The dataset with the spacing that `data.source_spacing_mm` states; None: the headers are right.

    Raises: ConfigError: not positive numbers, or as `by_case`.
    """
    if setting is None:
        return dataset
    check_source_spacing(setting)
    if isinstance(setting, Mapping):
        by_case(setting, dataset.cases, _SPACING)
    cases = (replace(case, source_spacing_mm=source_spacing(setting, case.id)) for case in dataset.cases)
    return replace(dataset, cases=tuple(cases))


def check_source_spacing(setting: Any, name: str = _SPACING) -> None:
    """Check a spacing that is stated in place of the headers'.

    Args:
        name: of the key or argument that states it, for messages.
    Raises:
        ConfigError: neither two or three positive numbers nor a mapping of patterns to such.
    """
    for spacing in setting.values() if isinstance(setting, Mapping) else [setting]:
        if not (
            isinstance(spacing, (list, tuple)) and len(spacing) in (2, 3) and all(map(_is_positive, spacing))
        ):
            what = "positive numbers of mm (right, anterior, superior), or {PATTERN: [...]} of case ids"
            raise ConfigError(f"{name}={setting}: expected {what}")


def source_spacing(setting: Any, case: str) -> tuple[float, ...] | None:
    """What a checked `data.source_spacing_mm` states of a case; None: its headers are right."""
    stated = setting_of(setting, case, _SPACING) if isinstance(setting, Mapping) else setting
    return None if stated is None else tuple(map(float, stated))


def with_annotated(dataset: Dataset, setting: Any) -> Dataset:
    """The dataset with the classes that `data.annotated` names for some cases; None: as the dataset says.

    Raises: ConfigError: not {PATTERN: [classes]}, an unknown class, image-level targets, or as `by_case`.
    """
    if setting is None:
        return dataset
    if not dataset.targets.per_voxel:
        raise ConfigError(f"{_ANNOTATED} is for label maps, but this dataset has image-level targets")
    classes = dataset.class_names[1:]
    for names in setting.values() if isinstance(setting, Mapping) else [setting]:
        lists = isinstance(setting, Mapping) and isinstance(names, (list, tuple)) and len(names) > 0
        if not lists or not {*names} <= {*classes}:
            what = f"{{PATTERN: [classes]}} of case ids and of {', '.join(classes)}"
            raise ConfigError(f"{_ANNOTATED}={setting}: expected {what}")
    found = by_case(setting, dataset.cases, _ANNOTATED)
    values = {case: tuple(sorted(1 + classes.index(name) for name in names)) for case, names in found.items()}
    cases = (_annotating(case, values[case.id]) if case.id in values else case for case in dataset.cases)
    return replace(dataset, cases=tuple(cases))


def _annotating(case: Case, values: tuple[int, ...]) -> Case:
    """Its contours (RTSTRUCT) may lack the structures that it does not annotate."""
    if case.label is None:
        return replace(case, annotated=values)
    known = dict(case.relabel or ())
    others = [
        own for own in range(1, 1 + len(structures_of(case.label))) if known.get(own, own) not in values
    ]
    return replace(case, annotated=values, label=without(case.label, others))


def check_annotated(train: Sequence[Case], dataset: Dataset, pairs: Sequence[tuple[int, int]]) -> None:
    """Raises: ConfigError: a class that no training case annotates, or a case that annotates only one of two
    classes that a mirror exchanges. Args: pairs: of `data.flip_label_pairs`.
    """
    names = dataset.class_names
    for value, name in enumerate(names[1:], start=1):
        if all(case.annotated is not None and value not in case.annotated for case in train):
            raise ConfigError(f"{_ANNOTATED}: no training case annotates {name}")
    for case in (case for case in dataset.cases if case.annotated is not None):
        for a, b in pairs:
            if (a in case.annotated) != (b in case.annotated):  # type: ignore[operator]
                what = f"only one of {names[a]} and {names[b]}, which data.flip_label_pairs exchanges"
                raise ConfigError(f"{_ANNOTATED}: case {case.id} annotates {what}")


def with_weights(dataset: Dataset, setting: Any) -> Dataset:
    """The dataset with the weights of `data.case_weights`; None: as the dataset says.

    Raises: ConfigError: not {PATTERN: a positive number}, or as `by_case`.
    """
    if setting is None:
        return dataset
    if not isinstance(setting, Mapping) or not all(map(_is_positive, setting.values())):
        raise ConfigError(f"{_WEIGHTS}={setting}: expected {{PATTERN: a positive number}} of case ids")
    found = by_case(setting, dataset.cases, _WEIGHTS)
    cases = (replace(case, weight=float(found.get(case.id, case.weight))) for case in dataset.cases)
    return replace(dataset, cases=tuple(cases))


def by_case(setting: Mapping[str, Any], cases: Sequence[Case], key: str) -> dict[str, Any]:
    """Case id to the value of the pattern that it matches, for those that match one.

    Raises: ConfigError: a pattern that no case matches, or a case that matches two.
    """
    found = {case.id: value for case in cases if (value := setting_of(setting, case.id, key)) is not None}
    for pattern in setting:
        if not any(fnmatchcase(case.id, str(pattern)) for case in cases):
            ids = some([case.id for case in cases], 5)
            raise ConfigError(f"{key}: no case matches {pattern}; the ids are {ids}")
    return found


def setting_of(setting: Mapping[str, Any], case: str, key: str) -> Any:
    """The value of the pattern that a case id matches; None: none. Raises: ConfigError: it matches two."""
    found = [pattern for pattern in setting if fnmatchcase(case, str(pattern))]
    if len(found) > 1:
        raise ConfigError(f"{key}: case {case} matches both {found[0]} and {found[1]}")
    return setting[found[0]] if found else None


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
