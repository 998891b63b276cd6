"""Cross-validation: find the runs of a folder that belong together, each validated on a fold of its own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from medconv.config import flatten
from medconv.data.datasets.common import read_json
from medconv.metrics.dice import ClassScores
from medconv.targets import Targets
from medconv.training.run_dir import FREE, RunDir, short_hash
from medconv.utils.logging import some

JSON, CSV = "cross_validation.json", "folds.csv"
_MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}$")  # old runs, renamed by run.resume=never
_NUMBER = re.compile(r"[0-9]{1,4}")
_FACTS = (
    "train_cases",
    "num_train_cases",
    "class_counts",
    "targets.means",
    "targets.stds",
    "memory_gb",  # of the machine
)
_PER_FOLD = ("data.fold", "loss.class_counts", "loss.num_cases", *(f"derived.{key}" for key in _FACTS))


@dataclass(frozen=True)
class Fold:
    """One run. Args: config: its nested values. rows: the best checkpoint's validation, case id to Dice per
    class, or to outputs and values. skipped: case id to the reason.
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
        return flatten(self.config)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it validated."""
        return tuple(next(iter(self.rows.values()), {}))

    @property
    def done(self) -> bool:
        return self.status == "done" and bool(self.rows)


@dataclass(frozen=True)
class CrossValidation:
    """Runs whose configs differ in `data.fold` alone.

    Args: label: the overrides that distinguish it from the others of a sweep. folds: those that are done.
        missing: the other folds, number to state.
    """

    key: str
    label: str
    folds: tuple[Fold, ...]
    missing: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def targets(self) -> Targets:
        """What the networks predict, without what each fold's training cases decided."""
        prefix, values = "derived.targets.", self.folds[0].values
        keys = (key for key in values if key.startswith(prefix) and key not in _PER_FOLD)
        content = {key.removeprefix(prefix): values[key] for key in keys}
        return Targets.from_plain(content)

    @property
    def cases(self) -> list[tuple[str, str, ClassScores]]:
        """(fold, case, Dice per class, or outputs and values) of every validated case."""
        return [(fold.number, case, row) for fold in self.folds for case, row in fold.rows.items()]


def read(home: Path, labels: Mapping[Path, str] | None = None, least: int = 2) -> list[CrossValidation]:
    """The cross-validations among the run folders in `home` with at least `least` folds, one of them done.

    Args: labels: run folder to the overrides that distinguish its cross-validation from others; without
        it, the label in an existing `cross_validation.json`.
    """
    earlier_labels = {entry["key"]: entry["label"] for entry in _written(home)}
    groups: dict[str, list[Fold]] = {}
    for fold in _runs(home):
        groups.setdefault(short_hash(_identity(fold)), []).append(fold)
    crossvals = []
    for key, runs in groups.items():
        if len({fold.number for fold in runs}) >= least and any(fold.done for fold in runs):
            own_labels = [labels[fold.folder.path] for fold in runs if labels and fold.folder.path in labels]
            crossvals.append(_group(key, own_labels[0] if own_labels else earlier_labels.get(key, ""), runs))
    return [_with_warnings(crossval, crossvals) for crossval in crossvals]


def _runs(home: Path) -> Iterator[Fold]:
    """The runs in a folder that validate on a fold, in order."""
    for path in sorted(home.iterdir()) if home.is_dir() else []:
        if not (path / "config.yaml").is_file() or _MOVED_ASIDE.search(path.name):
            continue
        folder, config = RunDir(path), _config(path / "config.yaml")
        values = flatten(config)
        if str(values.get("data.fold", "all")) != "all":
            _check_folds(values, path / "config.yaml")
            summary = folder.summary()
            status = str(summary.get("status") or "not begun")
            rows, skipped = summary.get("val/cases") or {}, summary.get("skipped_cases") or {}
            yield Fold(str(values["data.fold"]), folder, config, status, rows, skipped)


def _config(path: Path) -> dict[str, Any]:
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"{path}: not a readable config ({' '.join(str(error).split())})") from error
    return config if isinstance(config, dict) else {}  # else of something else than a run


def _check_folds(values: Mapping[str, Any], path: Path) -> None:
    """Raises: ValueError: data.fold or data.num_folds is not a number; the fold becomes part of a folder's
    name.
    """
    fold, count = values["data.fold"], values.get("data.num_folds")
    if not _NUMBER.fullmatch(str(fold)):
        raise ValueError(f"{path}: data.fold must be `all` or a number, got {fold!r:.80}")
    if values.get("data.splits_file") is None and not _NUMBER.fullmatch(str(count)):
        raise ValueError(f"{path}: data.num_folds must be a number of folds, got {count!r:.80}")


def _identity(fold: Fold) -> dict[str, Any]:
    """The settings that all folds of one cross-validation share; values derived from the data are compared
    later, by `_disagreements`.
    """
    excluded = (*_PER_FOLD, "derived")
    return {
        k: v for k, v in fold.values.items() if k not in excluded and not k.startswith(("derived.", *FREE))
    }


def _group(key: str, label: str, runs: Sequence[Fold]) -> CrossValidation:
    done: dict[str, Fold] = {}
    warnings = []
    ended = [fold for fold in runs if fold.done]
    for fold in sorted(ended, key=lambda fold: (fold.folder.path / "summary.json").stat().st_mtime):
        if fold.number in done:
            warnings.append(
                f"fold {fold.number} was trained twice; {fold.name} counts, {done[fold.number].name} does not"
            )
        done[fold.number] = fold
    states, expected = {fold.number: fold.status for fold in runs}, _expected(runs[0].values)
    first = min(done, key=_place, default="")
    for number in [number for number in done if done[number].classes != done[first].classes]:
        states[number] = f"other classes: {', '.join(done.pop(number).classes)}"
    folds = tuple(done[number] for number in sorted(done, key=_place))
    absent = sorted({*states, *(expected or ())} - set(done), key=_place)
    missing = {number: states.get(number, "not there") for number in absent}
    if expected is None:
        splits = runs[0].values["data.splits_file"]
        warnings.append(
            f"data.splits_file={splits} cannot be read, so the number of folds is unknown; some may be "
            "missing"
        )
    if missing:
        states_text = ", ".join(
            f"{number} ({'stopped' if state == 'running' else state})" for number, state in missing.items()
        )
        count = sum(len(fold.rows) for fold in folds)
        warnings.append(
            f"without fold {states_text}: means are over {count} cases of fold "
            f"{', '.join(f.number for f in folds)}"
        )
    return CrossValidation(key, label, folds, missing, (*warnings, *_disagreements(folds)))


def _disagreements(folds: Sequence[Fold]) -> Iterator[str]:
    """Warnings about folds that do not fit together."""
    folds_of: dict[str, list[str]] = {}
    for fold in folds:
        for case in fold.rows:
            folds_of.setdefault(case, []).append(fold.number)
    repeated = [f"{case} (fold {' and '.join(ns)})" for case, ns in folds_of.items() if len(ns) > 1]
    if repeated:
        yield f"{some(repeated)}: validated more than once, and counted as often"
    for fold in folds[1:]:
        differing = _difference(folds[0], fold)
        if differing:
            yield (
                f"fold {folds[0].number} and fold {fold.number}: the data was preprocessed differently: "
                f"{some(differing)}"
            )
    skipped = sorted({case for fold in folds for case in fold.skipped})
    if skipped:
        yield f"{some(skipped)}: skipped by data.on_invalid_case=skip, so not validated"


def _with_warnings(crossval: CrossValidation, others: Sequence[CrossValidation]) -> CrossValidation:
    """With a warning if another one has the folds that it lacks: their configs may differ by mistake."""
    warnings = []
    numbers = {fold.number for fold in crossval.folds}
    for other in others:
        other_numbers = {fold.number for fold in other.folds}
        if other is not crossval and crossval.missing and other.missing and not numbers & other_numbers:
            differing = some(_difference(crossval.folds[0], other.folds[0]))
            warnings.append(
                f"fold {', '.join(sorted(other_numbers))} was trained with another config, and is not "
                f"counted: {differing}"
            )
    return replace(crossval, warnings=(*crossval.warnings, *warnings))


def _difference(one: Fold, other: Fold) -> list[str]:
    keys = (k for k in sorted({*one.values, *other.values}) if k not in _PER_FOLD and not k.startswith(FREE))
    return [
        f"{k}={one.values.get(k)} and {other.values.get(k)}"
        for k in keys
        if one.values.get(k) != other.values.get(k)
    ]


def _expected(values: Mapping[str, Any]) -> list[str] | None:
    """The numbers of all folds; None where the splits file cannot be read."""
    if values.get("data.splits_file") is None:
        return [str(number) for number in range(int(values["data.num_folds"]))]
    try:
        return [str(number) for number in range(len(read_json(Path(values["data.splits_file"]))))]
    except (ValueError, TypeError):
        return None


def _written(home: Path) -> list[dict[str, Any]]:
    """The entries of an existing `cross_validation.json`."""
    try:
        entries = read_json(home / JSON)["crossvalidations"]
        return [entry for entry in entries if {"key", "label"} <= set(entry)]
    except (ValueError, KeyError, TypeError):
        return []


def _place(number: str) -> tuple[int, str]:
    return (int(number), "") if number.isdecimal() else (2**31, number)
