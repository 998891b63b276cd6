"""Training and validation cases of a fold: as nnU-Net cuts them, or of a splits file."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case
from medconv.data.datasets.common import read_json
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some

_SHUFFLE_SEED = 12345  # of nnU-Net
_MAX_NAMED = 20  # cases named in one line

log = logging.getLogger(__name__)


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
    fold_index = _fold_index(fold)
    units = sorted({case.group or case.id for case in ordered})
    if not 2 <= num_folds <= len(units):
        unit_name = "groups" if any(case.group for case in ordered) else "cases"
        raise ArgumentError(
            "num_folds",
            f" must lie between 2 and the number of {unit_name}, {len(units)}, got {num_folds}; ",
            Argument("fold"),
            "=all needs no folds",
        )
    if not 0 <= fold_index < num_folds:
        raise ArgumentError("fold", f" must be `all` or lie in 0..{num_folds - 1}, got {fold}")
    shuffled = np.arange(len(units))
    np.random.RandomState(_SHUFFLE_SEED).shuffle(shuffled)
    val_units = {units[index] for index in np.array_split(shuffled, num_folds)[fold_index]}
    train = [case for case in ordered if (case.group or case.id) not in val_units]
    val = [case for case in ordered if (case.group or case.id) in val_units]
    return train, val


def _fold_index(fold: int | str) -> int:
    """The number of a fold; -1: not a number."""
    return int(fold) if str(fold).isdecimal() else -1


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


def _ids_of_file(fold: int | str, path: Path) -> tuple[list[str], list[str]]:
    """Ids for training and validation in a fold of a file, in one Unicode form."""
    fold_index = _fold_index(fold)
    folds = read_json(path)
    if not isinstance(folds, list) or not all(_has_fold_keys(fold) for fold in folds):
        raise ValueError(f"{path}: expected a list of folds, each with the keys `train` and `val`")
    if not 0 <= fold_index < len(folds):
        highest = len(folds) - 1
        raise ValueError(f"{path}: fold must be `all` or lie in 0..{highest}, got {fold}")
    train_ids = folds[fold_index]["train"]
    val_ids = folds[fold_index]["val"]
    _check_ids(train_ids, f"{path}: train of fold {fold_index}")
    _check_ids(val_ids, f"{path}: val of fold {fold_index}")
    if not val_ids:
        raise ValueError(f"{path}: val of fold {fold_index} names no case; fold=all trains on every case")
    normalised_train_ids = [unicodedata.normalize("NFC", case_id) for case_id in train_ids]
    return normalised_train_ids, [unicodedata.normalize("NFC", case_id) for case_id in val_ids]


def _has_fold_keys(fold: Any) -> bool:
    return isinstance(fold, dict) and {"train", "val"} <= set(fold)


def _check_ids(case_ids: Any, location: str) -> None:
    """Raises: ValueError: not a list of texts, or one that is there twice; begins with the location."""
    if not isinstance(case_ids, list) or not all(isinstance(case_id, str) for case_id in case_ids):
        raise ValueError(f"{location} must be a list of case ids, got {case_ids!r:.80}")
    repeated = sorted(case_id for case_id, count in Counter(case_ids).items() if count > 1)
    if repeated:
        raise ValueError(
            f"{location} has cases twice: {', '.join(repeated[:20])}; "
            "case_weights draws some cases more often"
        )
