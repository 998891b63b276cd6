"""Training, validation and test cases: from the dataset's own splits, else by folds as nnU-Net cuts them, or
of a splits file.
"""

import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medconv.data.case import Case
from medconv.data.datasets.common import read_json
from medconv.targets import Targets
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some

_MAX_NAMED = 20  # cases named in one line
# An image number after a patient number, such as patient001_frame12
_NUMBERED = re.compile(r"(?P<patient>.*\d.*)(?P<separator>[_-][A-Za-z]*)[_-]?\d+")
_HAS_DIGIT = re.compile(r"\d")
_NEARLY_ALL = 0.9  # share of the images that would be there if every patient had one of each kind

_SHUFFLE_SEED = 12345  # of nnU-Net

log = logging.getLogger(__name__)


class DataSplit(NamedTuple):
    """The cases of a run.

    Args:
        train: the network is fitted to them.
        val: the best checkpoint is chosen by them.
        test: never seen in training.
    """

    train: list[Case]
    val: list[Case]
    test: list[Case]


def split_cases(
    cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None
) -> DataSplit:
    """The splits that the cases define; a fold if they define no validation cases.

    Args:
        fold: its number, from 0, or `all`.
        splits: path of a splits file, see `split_fold`.

    Raises:
        ValueError: as `split_fold`, or a group in two splits.
    """
    by_split: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_split[case.split].append(case)
    train = by_split["train"] + by_split[""]
    val = by_split["val"]
    if not val or fold == "all" or splits is not None:
        train, val = split_fold([*train, *val], fold, num_folds, splits)
    elif str(fold) != "0":
        log.warning("fold=%s is not used: the dataset defines its training and validation cases", fold)
    data_split = DataSplit(train, val, by_split["test"])
    if any(case.group for case in cases):
        _check_groups(data_split)
    return data_split


def grouped(cases: Sequence[Case], group_pattern: str) -> tuple[Case, ...]:
    """The cases, grouped by the text that a pattern finds in their ids.

    Args:
        cases: without groups.
        group_pattern: regular expression; the text of its groups, joined by `_`, is the
            case's group, or the whole match if it has none.

    Raises:
        ArgumentError: no regular expression, cases in which it finds nothing, or cases that have groups.
    """
    if any(case.group for case in cases):
        raise ArgumentError("group_pattern", ": the dataset names its groups already; set only one of both")
    try:
        matches = [re.search(group_pattern, case.id) for case in cases]
    except re.error as error:
        raise ArgumentError("group_pattern", f"={group_pattern}: no regular expression, {error}") from error
    group_names = [_group_name(match) for match in matches]
    ungrouped = [case.id for case, name in zip(cases, group_names, strict=True) if not name]
    if ungrouped:
        ungrouped_ids = some(ungrouped, _MAX_NAMED)
        raise ArgumentError(
            "group_pattern", f"={group_pattern}: finds nothing in the case ids {ungrouped_ids}"
        )
    return tuple(replace(case, group=name) for case, name in zip(cases, group_names, strict=True))


def _group_name(match: re.Match[str] | None) -> str:
    """The text of the groups of a match, or all of it; empty if there is none."""
    if match is None:
        return ""
    if not any(match.groups()):  # no groups, or another alternative than theirs
        return "" if match.re.groups == 1 else match[0]
    return "_".join(text or "" for text in match.groups())


class SplitPatient(NamedTuple):
    """A case in training and one in validation whose ids suggest the same patient.

    Args:
        group_pattern: for `grouped`, which would keep them together.
    """

    train: str
    val: str
    group_pattern: str


def split_patient(data_split: DataSplit) -> SplitPatient | None:
    """A patient in training and validation, as far as case ids tell; None where cases have groups."""
    if any(case.group for cases in data_split for case in cases):
        return None
    # By ids such as patient001_frame12: a patient's number before an image's
    train_matches = [match for case in data_split.train if (match := _NUMBERED.fullmatch(case.id))]
    val_matches = [match for case in data_split.val if (match := _NUMBERED.fullmatch(case.id))]
    images_per_patient = Counter(match["patient"] for match in [*train_matches, *val_matches])
    # With a single repeated name it is that of the dataset, as in BraTS20_001
    if sum(count > 1 for count in images_per_patient.values()) > 1:
        train_by_patient = {match["patient"]: match for match in train_matches}
        for match in val_matches:
            train_match = train_by_patient.get(match["patient"])
            if train_match is not None:
                return SplitPatient(train_match[0], match[0], f"(.+){re.escape(match['separator'])}")
    return _images_of_each_kind(data_split)


def _images_of_each_kind(data_split: DataSplit) -> SplitPatient | None:
    """By ids such as ED_A0S9V9 and ES_A0S9V9: a word with a number, once beside each kind of image."""
    train_ids = [case.id for case in data_split.train]
    val_ids = [case.id for case in data_split.val]
    for separator in "_-":
        words_by_id = {case_id: case_id.split(separator) for case_id in [*train_ids, *val_ids]}
        if len({len(words) for words in words_by_id.values()}) > 1:
            continue
        position = _patient_position(list(words_by_id.values()))
        if position is None:
            continue
        train_by_patient = {words_by_id[case_id][position]: case_id for case_id in train_ids}
        for case_id in val_ids:
            train_id = train_by_patient.get(words_by_id[case_id][position])
            if train_id is not None:
                word = f"([^{separator}]+)"
                return SplitPatient(train_id, case_id, "^" + f"[^{separator}]+{separator}" * position + word)
    return None


def _patient_position(words_of_ids: Sequence[Sequence[str]]) -> int | None:
    """Which word of ids is the patient's; None: no word occurs once beside each kind of image.

    Args: words_of_ids: for each id, equally many words.
    """
    if not words_of_ids:
        return None
    follows_kind = False  # whether a word before this one differs between ids
    for position, words in enumerate(zip(*words_of_ids, strict=True)):
        patients = set(words)
        kinds = {(*words[:position], *words[position + 1 :]) for words in words_of_ids}
        images = len(words_of_ids) / (len(patients) * len(kinds))
        # In benign_001 and malignant_001, images of each kind are counted
        counts_images = follows_kind and all(word.isdecimal() for word in patients)
        if (
            1 < len(kinds) < len(patients)
            and images >= _NEARLY_ALL
            and all(_HAS_DIGIT.search(word) for word in patients)
            and not counts_images
        ):
            return position
        follows_kind |= len(patients) > 1
    return None


def drop_cases(data_split: DataSplit, skipped: Mapping[str, str]) -> DataSplit:
    """The split without some cases.

    Args:
        skipped: case id to the reason.
    """
    train, val, test = ([case for case in cases if case.id not in skipped] for cases in data_split)
    return DataSplit(train, val, test)


def drop_duplicates(data_split: DataSplit, contents: Mapping[str, str]) -> DataSplit:
    """The split without training cases whose image is also in validation or test; a warning names them.

    Args:
        contents: case id to a hash of its image; empty: equal to no other.

    Raises:
        ValueError: no training case remains.
    """
    held_out = [*data_split.test, *data_split.val]
    held_out_ids = {contents[case.id]: case.id for case in held_out if contents.get(case.id)}
    copies: dict[str, str] = {}  # training case to the held-out case with the same image
    for case in data_split.train:
        content = contents.get(case.id)
        if content in held_out_ids:
            copies[case.id] = held_out_ids[content]
    if not copies:
        return data_split
    pairs = [f"{train_id} ({held_out_id})" for train_id, held_out_id in copies.items()]
    log.warning(
        "images of training cases are also in validation or test; skipped in training: %s",
        some(pairs, _MAX_NAMED),
    )
    train = [case for case in data_split.train if case.id not in copies]
    if not train:
        raise ValueError("every training image is also in validation or test, expected others to train on")
    return data_split._replace(train=train)


def check_examples(data_split: DataSplit, targets: Targets, remedy: str) -> None:
    """Check that training and validation have examples; less serious problems become a warning.

    Args: remedy: what changes this split, for the message.
    Raises:
        ValueError: training or validation lacks cases of some class, see `targets.check_examples`.
    """
    for split_name, cases in (("training", data_split.train), ("validation", data_split.val)):
        values = values_of(cases)
        if not values.size:  # label maps have no such values
            continue
        try:
            warning = targets.check_examples(values, split_name)
        except ValueError as error:
            raise ValueError(f"{error}; {remedy}") from error
        if warning:
            log.warning("%s", warning)


def values_of(cases: Sequence[Case]) -> np.ndarray:
    """The image-level labels of cases. Shape: (cases, values); no values for label maps."""
    num_values = len(cases[0].values or ()) if cases else 0
    rows = [case.values or () for case in cases]
    return np.array(rows, float).reshape(len(cases), num_values)


def _check_groups(data_split: DataSplit) -> None:
    """Raises: ValueError: cases of one group are in different splits."""
    first_cases: dict[str, dict[str, str]] = defaultdict(dict)  # group to split to its first case
    for split_name, cases in zip(("training", "validation", "test"), data_split, strict=True):
        for case in cases:
            if case.group:
                first_cases[case.group].setdefault(split_name, case.id)
    for group, case_ids in first_cases.items():
        if len(case_ids) > 1:
            examples = ", ".join(f"{case_id} in {split_name}" for split_name, case_id in case_ids.items())
            raise ValueError(
                f"group {group} is in more than one split: {examples}; expected all cases in one"
            )


def split_fold(
    cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None
) -> tuple[list[Case], list[Case]]:
    """Training and validation cases of a fold.

    Sorted case ids are shuffled once with seed 12345 and cut into `num_folds`, as in nnU-Net, so fold k has
    the same cases. If cases have groups, the groups are split instead of the ids.

    Args:
        cases: all cases but those of a test split.
        fold: its number, from 0; `all` trains on every case and validates on none.
        num_folds: at least 2.
        splits: a `splits_final.json` (list of {"train": ids, "val": ids}) to use instead.

    Raises:
        ValueError: no such fold, more folds than cases or groups, or an invalid splits file.
    """
    ordered = sorted(cases, key=lambda case: case.id)
    if fold == "all":
        return ordered, []
    if splits is not None:
        return _fold_of_file(ordered, fold, splits)
    units = sorted({case.group or case.id for case in ordered})
    if not 2 <= num_folds <= len(units):
        unit_name = "group" if any(case.group for case in ordered) else "case"
        if len(units) < 2:
            raise ArgumentError(
                "fold", f"={fold}: a single {unit_name} has no folds; ", Argument("fold"), "=all trains on it"
            )
        raise ArgumentError(
            "num_folds",
            f" must lie between 2 and the number of {unit_name}s, {len(units)}, got {num_folds}; ",
            Argument("num_folds"),
            f"={len(units)} validates one {unit_name} a fold, and ",
            Argument("fold"),
            "=all trains on every case and validates none",
        )
    if not str(fold).isdecimal() or int(fold) >= num_folds:
        raise ArgumentError("fold", f" must be `all` or lie in 0..{num_folds - 1}, got {fold}")
    shuffled = np.arange(len(units))
    np.random.RandomState(_SHUFFLE_SEED).shuffle(shuffled)
    val_units = {units[index] for index in np.array_split(shuffled, num_folds)[int(fold)]}
    train = [case for case in ordered if (case.group or case.id) not in val_units]
    val = [case for case in ordered if (case.group or case.id) in val_units]
    return train, val


def _fold_of_file(cases: Sequence[Case], fold: int | str, path: Path) -> tuple[list[Case], list[Case]]:
    train_ids, val_ids = _ids_of_file(fold, path)
    by_id = {unicodedata.normalize("NFC", case.id): case for case in cases}
    unknown = sorted({*train_ids, *val_ids} - set(by_id))
    if unknown:
        raise ValueError(
            f"{path}: no such cases: {some(unknown, _MAX_NAMED)}; the dataset has {some(list(by_id), 3)}"
        )
    in_both = sorted(set(train_ids) & set(val_ids))
    if in_both:
        raise ValueError(f"{path}: cases in both train and val: {some(in_both, _MAX_NAMED)}")
    left_out = sorted(set(by_id) - {*train_ids, *val_ids})
    if left_out:
        log.warning(
            "%s: cases that are neither in train nor in val of fold %s: %s",
            path,
            fold,
            some(left_out, _MAX_NAMED),
        )
    return [by_id[case_id] for case_id in train_ids], [by_id[case_id] for case_id in val_ids]


def folds_of_file(path: Path) -> list[dict[str, Any]]:
    """The folds of a splits file. Raises: ValueError: it is none."""
    folds = read_json(path)
    if not isinstance(folds, list) or not all(
        isinstance(fold, dict) and {"train", "val"} <= set(fold) for fold in folds
    ):
        raise ValueError(f"{path}: expected a list of folds, each with the keys `train` and `val`")
    return folds


def _ids_of_file(fold: int | str, path: Path) -> tuple[list[str], list[str]]:
    """Ids for training and validation in a fold of a file, in one Unicode form."""
    folds = folds_of_file(path)
    if not str(fold).isdecimal() or int(fold) >= len(folds):
        highest = len(folds) - 1
        raise ValueError(f"{path}: fold must be `all` or lie in 0..{highest}, got {fold}")
    fold_index = int(fold)
    train_ids = folds[fold_index]["train"]
    val_ids = folds[fold_index]["val"]
    _check_ids(train_ids, f"{path}: train of fold {fold_index}")
    _check_ids(val_ids, f"{path}: val of fold {fold_index}")
    if not val_ids:
        raise ValueError(f"{path}: val of fold {fold_index} names no case; fold=all trains on every case")
    normalised_train_ids = [unicodedata.normalize("NFC", case_id) for case_id in train_ids]
    return normalised_train_ids, [unicodedata.normalize("NFC", case_id) for case_id in val_ids]


def _check_ids(case_ids: Any, location: str) -> None:
    """Raises: ValueError: not a list of texts, or one that is there twice; begins with the location."""
    if not isinstance(case_ids, list) or not all(isinstance(case_id, str) for case_id in case_ids):
        raise ValueError(f"{location} must be a list of case ids, got {case_ids!r:.80}")
    repeated = sorted(case_id for case_id, count in Counter(case_ids).items() if count > 1)
    if repeated:
        raise ValueError(
            f"{location} has cases twice: {some(repeated, _MAX_NAMED)}; "
            "case_weights draws some cases more often"
        )
