"""Training, validation and test cases: from the dataset's own splits, else by folds."""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medconv.config.values import ConfigError
from medconv.data.case import Case
from medconv.data.datasets.common import read_json
from medconv.targets import Targets
from medconv.utils.logging import some

_MAX_NAMED = 20  # cases named in one line
_NUMBERED = re.compile(r"(?P<patient>.*\d.*)(?P<part>[_-][A-Za-z]*)[_-]?\d+")  # patient001_frame12

log = logging.getLogger(__name__)


class DataSplit(NamedTuple):
    """Args: test: never seen in training."""

    train: list[Case]
    val: list[Case]
    test: list[Case]


def split_cases(
    cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None
) -> DataSplit:
    """Splits as the cases define them; a fold if they define no validation cases.

    Args: splits: path of a splits file, see `split_fold`.
    Raises: ValueError: as `split_fold`, or a group in two splits.
    """
    names = ("train", "val", "test", "")
    first, val, test, rest = ([case for case in cases if case.split == name] for name in names)
    train = [*first, *rest]
    if not val or fold == "all" or splits is not None:
        train, val = split_fold([*train, *val], fold, num_folds, splits)
    elif str(fold) != "0":
        log.warning("data.fold=%s is not used: the dataset defines its training and validation cases", fold)
    data_split = DataSplit(train, val, test)
    _check_groups(data_split)
    if splits is None and (example := next(_split_apart(data_split), None)):
        one, other, pattern = example
        log.warning(
            "%s is in training and %s in validation; if they are of one patient, the scores are too high: "
            "data.group_pattern='%s' keeps a patient's cases in one fold",
            *(one, other, pattern),
        )
    return data_split


def grouped(cases: Sequence[Case], pattern: str) -> tuple[Case, ...]:
    """The cases, with the text that `pattern` finds in each id as its group: its groups, or all that matches.

    Raises: ConfigError: no regular expression, cases in which it finds nothing, or cases that have groups.
    """
    if any(case.group for case in cases):
        raise ConfigError("data.group_pattern: the dataset names its groups already; set only one of both")
    try:
        found = {case.id: re.search(pattern, case.id) for case in cases}
    except re.error as error:
        raise ConfigError(f"data.group_pattern={pattern}: no regular expression, {error}") from error
    if without := [case for case, match in found.items() if not match or not _text(match)]:
        what = "finds nothing in the case ids"
        raise ConfigError(f"data.group_pattern={pattern}: {what} {some(without, _MAX_NAMED)}")
    return tuple(replace(case, group=_text(match)) for case in cases if (match := found[case.id]))


def _text(match: re.Match[str]) -> str:
    return "_".join(part or "" for part in match.groups()) if match.groups() else match[0]


def _split_apart(data_split: DataSplit) -> Iterator[tuple[str, str, str]]:
    """Cases in training and validation whose ids look like one patient's, and a pattern that joins them."""
    if any(case.group for cases in data_split for case in cases):
        return
    matches = {
        split: [m for case in cases if (m := _NUMBERED.fullmatch(case.id))]
        for split, cases in zip(("train", "val"), data_split, strict=False)
    }
    patients = Counter(m["patient"] for found in matches.values() for m in found)
    if sum(count > 1 for count in patients.values()) < 2:  # else it is a dataset's name, as in BraTS20_001
        return
    training = {m["patient"]: m for m in matches["train"]}
    for m in matches["val"]:
        if other := training.get(m["patient"]):
            yield other[0], m[0], f"(.+){re.escape(m['part'])}"


def drop_cases(data_split: DataSplit, skipped: Mapping[str, str]) -> DataSplit:
    """The split without the skipped case ids."""
    return DataSplit(*([case for case in cases if case.id not in skipped] for cases in data_split))


def drop_duplicates(data_split: DataSplit, contents: Mapping[str, str]) -> DataSplit:
    """The split without training cases whose image is also in validation or test; a warning names them.

    Args: contents: case id to a hash of its voxels.
    """
    held_out = [*data_split.test, *data_split.val]
    elsewhere = {contents[case.id]: case.id for case in held_out if case.id in contents}
    copies = {c.id: elsewhere[contents[c.id]] for c in data_split.train if contents.get(c.id) in elsewhere}
    if not copies:
        return data_split
    pairs = [f"{case} ({other})" for case, other in copies.items()]
    what = "%d images are in training and also in validation or test; skipped in training: %s"
    log.warning(what, len(copies), some(pairs, _MAX_NAMED))
    return data_split._replace(train=[case for case in data_split.train if case.id not in copies])


def check_examples(data_split: DataSplit, targets: Targets) -> None:
    """Raises: ValueError: training or validation lacks cases of some class, see `targets.check_examples`."""
    for split, cases in (("training", data_split.train), ("validation", data_split.val)):
        if cases and (warning := targets.check_examples(values_of(cases), split)):
            log.warning("%s", warning)


def values_of(cases: Sequence[Case]) -> np.ndarray:
    """The image-level labels of cases, (cases, values); no values for label maps."""
    width = len(cases[0].values or ()) if cases else 0
    return np.array([case.values or () for case in cases], float).reshape(len(cases), width)


def _check_groups(data_split: DataSplit) -> None:
    groups: dict[str, dict[str, str]] = defaultdict(dict)  # split to its first case
    for split, cases in zip(("training", "validation", "test"), data_split, strict=True):
        for case in (case for case in cases if case.group):
            groups[case.group].setdefault(split, case.id)
    for group, examples in groups.items():
        if len(examples) > 1:
            found = ", ".join(f"{case} in {split}" for split, case in examples.items())
            raise ValueError(f"group {group} is in more than one split: {found}; expected all cases in one")


def split_fold(
    cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None
) -> tuple[list[Case], list[Case]]:
    """Training and validation cases of a fold; fold `all` trains on every case and validates on none.

    Sorted case ids, shuffled once with seed 12345 and cut into `num_folds`, as in nnU-Net: fold k has the
    same cases. If cases have groups, the groups are split instead of the ids.
    Args: splits: a `splits_final.json` (list of {"train": ids, "val": ids}) to use instead.
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
        limits = f"between 2 and the number of {what}, {len(units)}"
        raise ValueError(f"data.num_folds must lie {limits}, got {num_folds}; data.fold=all needs no folds")
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
    folds = read_json(path)
    valid = isinstance(folds, list) and all(isinstance(f, dict) and {"train", "val"} <= set(f) for f in folds)
    if not valid:
        raise ValueError(f"{path}: expected a list of folds, each with the keys `train` and `val`")
    if not 0 <= fold < len(folds):
        raise ValueError(f"{path}: data.fold must be `all` or lie in 0..{len(folds) - 1}, got {fold}")
    by_id = {case.id: case for case in cases}
    train, val = folds[fold]["train"], folds[fold]["val"]
    for key, ids in (("train", train), ("val", val)):
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise ValueError(f"{path}: {key} of fold {fold} must be a list of case ids, got {ids!r:.80}")
        if twice := sorted(each for each, count in Counter(ids).items() if count > 1):
            raise ValueError(
                f"{path}: {key} of fold {fold} has cases twice: {', '.join(twice[:20])}; "
                "data.case_weights draws some cases more often"
            )
    unknown, both = sorted({*train, *val} - set(by_id)), sorted(set(train) & set(val))
    if unknown or both:
        raise ValueError(f"{path}: unknown cases {unknown[:20]}, cases in both train and val {both[:20]}")
    return [by_id[case] for case in train], [by_id[case] for case in val]
