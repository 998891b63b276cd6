"""The runs of a folder that validate on a fold: their configs, states and validation scores."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from yaml import YAMLError

from medconv.config import flatten
from medconv.config.values import from_yaml
from medconv.data import splits
from medconv.inference.load import MOVED_ASIDE
from medconv.metrics.dice import ClassScores
from medconv.training import identity
from medconv.training.identity import FREE
from medconv.training.run_dir import RunDir, config_text
from medconv.utils.errors import reason

_NUMBER = re.compile(r"[0-9]{1,4}")
# keys whose values may differ between the folds of one cross-validation
PER_FOLD = (
    "data.fold",
    "loss.class_counts",
    "loss.num_cases",
    "loss.value.class_counts",
    "loss.value.num_cases",
    "derived.train_cases",
    "derived.num_train_cases",
    "derived.class_counts",
    "derived.targets.means",
    "derived.targets.stds",
    "derived.targets.of_image.means",
    "derived.targets.of_image.stds",
    "derived.memory_gb",  # of the machine
)


@dataclass(frozen=True)
class Fold:
    """One run.

    Args:
        number: of the fold, as the config writes it.
        folder: of the run.
        config: its nested values.
        status: as in `summary.json`.
        rows: the best checkpoint's validation, case id to Dice per class, or to outputs and values.
        skipped: case id to the reason.
    """

    number: str
    folder: RunDir
    config: dict[str, Any]
    status: str
    rows: dict[str, ClassScores]
    skipped: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.path.name

    @cached_property
    def values(self) -> dict[str, Any]:
        """The config, with dotted keys."""
        return identity.settings_of(self.config)

    @cached_property
    def data(self) -> identity.DataIdentity | None:
        """The cases of the run and their contents; None: not known, as of runs of earlier versions."""
        return identity.read_data_identity(self.folder.path)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it validated."""
        first_row = next(iter(self.rows.values()), {})
        return tuple(first_row)

    @property
    def done(self) -> bool:
        return self.status == "done" and bool(self.rows)

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that all folds of one cross-validation share, without values derived from the data."""
        free_keys = ("derived.", *FREE)  # FREE: keys that a resumed run may change
        settings = {}
        for key, value in self.values.items():
            if key not in PER_FOLD and key != "derived" and not key.startswith(free_keys):
                settings[key] = value
        return settings

    def differences(self, compared: "Fold") -> list[str]:
        """Settings, derived values and contents of cases in which two folds differ, but should not."""
        texts = []
        for key in sorted({*self.values, *compared.values}):
            value = self.values.get(key)
            compared_value = compared.values.get(key)
            if key not in PER_FOLD and not key.startswith(FREE) and value != compared_value:
                texts.append(f"{key}={value} and {compared_value}")
        if self.data is not None and compared.data is not None:
            texts += identity.changes(self.data, compared.data)
        return texts

    @property
    def all_numbers(self) -> list[str] | None:
        """The numbers of all folds of its cross-validation; None where the splits file cannot be read."""
        splits_file = self.values.get("data.splits_file")
        if splits_file is None:
            count = int(self.values["data.num_folds"])
        else:
            try:
                count = len(splits.folds_of_file(Path(splits_file)))
            except ValueError:
                return None
        return [str(number) for number in range(count)]


def read_folds(runs: Path) -> Iterator[Fold]:
    """The runs in a folder that validate on a fold, in order.

    Raises:
        ValueError: a config that cannot be read, or without a usable fold.
    """
    for path in sorted(runs.iterdir()) if runs.is_dir() else []:
        config_path = path / "config.yaml"
        if not config_path.is_file() or MOVED_ASIDE.search(path.name):
            continue
        config = _read_config(config_path)
        values = flatten(config)
        if str(values.get("data.fold", "all")) == "all":
            continue
        _check_fold(values, config_path)
        folder = RunDir(path)
        summary = folder.summary()
        yield Fold(
            number=str(values["data.fold"]),
            folder=folder,
            config=config,
            status=str(summary.get("status") or "not begun"),
            rows=summary.get("val/cases") or {},
            skipped=summary.get("skipped_cases") or {},
        )


def fold_order(number: str) -> tuple[int, str]:
    """Sort key: by value, and what is not a number last."""
    return (int(number), "") if number.isdecimal() else (2**31, number)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: Any = from_yaml(config_text(path))
    except (OSError, ValueError, YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable config ({reason(error)})") from error
    return config if isinstance(config, dict) else {}  # a list: not the config of a run


def _check_fold(values: Mapping[str, Any], path: Path) -> None:
    """Check the fold, which becomes part of a folder's name.

    Raises:
        ValueError: data.fold or data.num_folds is not a number.
    """
    fold = values["data.fold"]
    count = values.get("data.num_folds")
    if not _NUMBER.fullmatch(str(fold)):
        raise ValueError(f"{path}: data.fold must be `all` or a number, got {fold!r:.80}")
    if values.get("data.splits_file") is None and not _NUMBER.fullmatch(str(count)):
        raise ValueError(f"{path}: data.num_folds must be a number of folds, got {count!r:.80}")
