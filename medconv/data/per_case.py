"""Settings of `data` that may differ between cases: by patterns of case ids, such as `siteA_*`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from medconv.config.values import ConfigError
from medconv.data.case import Case, Dataset
from medconv.utils.logging import some

_SPACING = "data.source_spacing_mm"


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


def check_source_spacing(setting: Any) -> None:
    """Raises: ConfigError: neither two or three positive numbers nor a mapping of patterns to such."""
    for spacing in setting.values() if isinstance(setting, Mapping) else [setting]:
        if not (isinstance(spacing, (list, tuple)) and len(spacing) in (2, 3) and all(map(_is_mm, spacing))):
            what = "positive numbers of mm (right, anterior, superior), or {PATTERN: [...]} of case ids"
            raise ConfigError(f"{_SPACING}={setting}: expected {what}")


def source_spacing(setting: Any, case: str) -> tuple[float, ...] | None:
    """What a checked `data.source_spacing_mm` states of a case; None: its headers are right."""
    stated = setting_of(setting, case, _SPACING) if isinstance(setting, Mapping) else setting
    return None if stated is None else tuple(map(float, stated))


def by_case(setting: Mapping[str, Any], cases: Sequence[Case], key: str) -> dict[str, Any]:
    """Case id to the value of the pattern that it matches, for those that match one.

    Raises: ConfigError: a pattern that no case matches, or a case that matches two.
    """
    found = {case.id: value for case in cases if (value := setting_of(setting, case.id, key)) is not None}
    for pattern in setting:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            ids = some([case.id for case in cases], 5)
            raise ConfigError(f"{key}: no case matches {pattern}; the ids are {ids}")
    return found


def setting_of(setting: Mapping[str, Any], case: str, key: str) -> Any:
    """The value of the pattern that a case id matches; None: none. Raises: ConfigError: it matches two."""
    found = [pattern for pattern in setting if fnmatchcase(case, pattern)]
    if len(found) > 1:
        raise ConfigError(f"{key}: case {case} matches both {found[0]} and {found[1]}")
    return setting[found[0]] if found else None


def _is_mm(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf
