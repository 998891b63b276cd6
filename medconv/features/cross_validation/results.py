"""Cross-validation: find the runs of a folder that belong together, each validated on a fold of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medconv.data.datasets.common import read_json
from medconv.features.cross_validation.folds import PER_FOLD, Fold, fold_order, read_folds
from medconv.metrics.dice import ClassScores
from medconv.targets import Targets
from medconv.training.run_dir import short_hash
from medconv.utils.logging import some

JSON = "cross_validation.json"
CSV = "folds.csv"


@dataclass(frozen=True)
class CrossValidation:
    """Runs whose configs differ in `data.fold` alone.

    Args:
        key: hash of the shared settings.
        label: the overrides that distinguish it from the others of a sweep.
        folds: those that are done.
        missing: the other folds, number to state.
        warnings: for the user.
    """

    key: str
    label: str
    folds: tuple[Fold, ...]
    missing: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def targets(self) -> Targets:
        """What the networks predict, without what each fold's training cases decided."""
        return Targets.from_plain(_shared(self.folds[0].config["derived"]["targets"], "derived.targets"))

    @property
    def cases(self) -> list[tuple[str, str, ClassScores]]:
        """(fold, case, Dice per class, or outputs and values) of every validated case."""
        return [(fold.number, case, row) for fold in self.folds for case, row in fold.rows.items()]


def _shared(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The nested values of a node without those that may differ between folds."""
    return {
        key: _shared(value, f"{name}.{key}") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if f"{name}.{key}" not in PER_FOLD
    }


def read(runs: Path, labels: Mapping[Path, str] | None = None, min_folds: int = 2) -> list[CrossValidation]:
    """The cross-validations among the run folders in a folder, each with at least one fold that is done.

    Args:
        runs: folder of the run folders.
        labels: run folder to the overrides that distinguish its cross-validation from others; without it,
            the label in an existing `cross_validation.json`.
        min_folds: the smallest number of folds.
    Raises:
        ValueError: a config that cannot be read.
    """
    run_labels = labels or {}
    earlier_labels = {entry["key"]: entry["label"] for entry in _earlier_entries(runs)}
    groups: dict[str, list[Fold]] = {}
    for fold in read_folds(runs):
        # folds of one cross-validation differ in no setting but the fold
        key = short_hash(fold.shared_settings)
        groups.setdefault(key, []).append(fold)
    crossvals = []
    for key, folds in groups.items():
        numbers = {fold.number for fold in folds}
        if len(numbers) < min_folds or not any(fold.done for fold in folds):
            continue
        paths = [fold.folder.path for fold in folds]
        group_labels = [run_labels[path] for path in paths if path in run_labels]
        label = group_labels[0] if group_labels else earlier_labels.get(key, "")
        crossvals.append(_cross_validation(key, label, folds))
    return [_with_config_warnings(crossval, crossvals) for crossval in crossvals]


def _earlier_entries(runs: Path) -> list[dict[str, Any]]:
    """The entries of an existing `cross_validation.json`."""
    try:
        entries = read_json(runs / JSON)["crossvalidations"]
        return [entry for entry in entries if {"key", "label"} <= set(entry)]
    except (ValueError, KeyError, TypeError):
        return []


def _cross_validation(key: str, label: str, folds: Sequence[Fold]) -> CrossValidation:
    """The cross-validation of runs with the same settings, of which one is done."""
    done, warnings = _latest_done(folds)
    states = {fold.number: fold.status for fold in folds}
    first = done[min(done, key=fold_order)]
    for number, fold in list(done.items()):
        if fold.classes != first.classes:  # their scores cannot be averaged
            states[number] = f"other classes: {', '.join(fold.classes)}"
            del done[number]
    counted = tuple(done[number] for number in sorted(done, key=fold_order))
    expected = folds[0].all_numbers
    if expected is None:
        splits_file = folds[0].values["data.splits_file"]
        warnings.append(
            f"data.splits_file={splits_file} cannot be read, so the number of folds is unknown; some may be "
            "missing"
        )
    # both the folds that have begun and those that nobody has started
    missing_numbers = {*states, *(expected or ())} - set(done)
    missing = {}
    for number in sorted(missing_numbers, key=fold_order):
        missing[number] = states.get(number, "not there")
    if missing:
        warnings.append(_missing_warning(missing, counted))
    warnings += _disagreements(counted)
    return CrossValidation(key, label, counted, missing, tuple(warnings))


def _latest_done(folds: Sequence[Fold]) -> tuple[dict[str, Fold], list[str]]:
    """Number to the run that counts, and a warning for each that does not."""
    done: dict[str, Fold] = {}
    warnings = []
    ended = sorted((fold for fold in folds if fold.done), key=_end_time)
    for fold in ended:
        earlier = done.get(fold.number)
        if earlier is not None:
            warnings.append(
                f"fold {fold.number} was trained twice; {fold.name} counts, {earlier.name} does not"
            )
        done[fold.number] = fold
    return done, warnings


def _end_time(fold: Fold) -> float:
    summary_path = fold.folder.path / "summary.json"
    return summary_path.stat().st_mtime


def _missing_warning(missing: Mapping[str, str], folds: Sequence[Fold]) -> str:
    states = []
    for number, state in missing.items():
        # a run that ends writes another state
        states.append(f"{number} ({'stopped' if state == 'running' else state})")
    count = sum(len(fold.rows) for fold in folds)
    numbers = ", ".join(fold.number for fold in folds)
    return f"without fold {', '.join(states)}: means are over {count} cases of fold {numbers}"


def _disagreements(folds: Sequence[Fold]) -> Iterator[str]:
    """Warnings about folds that do not fit together."""
    numbers_of_case: dict[str, list[str]] = {}
    for fold in folds:
        for case in fold.rows:
            numbers_of_case.setdefault(case, []).append(fold.number)
    repeated = []
    for case, numbers in numbers_of_case.items():
        if len(numbers) > 1:
            repeated.append(f"{case} (fold {' and '.join(numbers)})")
    if repeated:
        yield f"{some(repeated)}: validated more than once, and counted as often"
    for fold in folds[1:]:
        differences = folds[0].differences(fold)
        if differences:
            yield (
                f"fold {folds[0].number} and fold {fold.number}: the data differs, or was preprocessed "
                f"differently: {some(differences)}"
            )
    for fold in folds:
        left_out = sorted({*(fold.data or {}).get("val", ())} - {*fold.rows, *fold.skipped})
        if left_out:
            yield (
                f"fold {fold.number}: {some(left_out)}: not validated, by trainer.limit_val_batches or a "
                "short trainer.max_time, so that all means are without them"
            )
    skipped = sorted({case for fold in folds for case in fold.skipped})
    if skipped:
        yield f"{some(skipped)}: skipped by data.on_invalid_case=skip, so not validated"


def _with_config_warnings(crossval: CrossValidation, crossvals: Sequence[CrossValidation]) -> CrossValidation:
    """With a warning if another one has the folds that it lacks: their configs may differ by mistake."""
    warnings = []
    numbers = {fold.number for fold in crossval.folds}
    for candidate in crossvals:
        # two complete cross-validations differ on purpose
        candidate_numbers = {fold.number for fold in candidate.folds}
        both_lack_folds = crossval.missing and candidate.missing
        if candidate is crossval or not both_lack_folds or numbers & candidate_numbers:
            continue
        differences = some(crossval.folds[0].differences(candidate.folds[0]))
        warnings.append(
            f"fold {', '.join(sorted(candidate_numbers))} was trained with another config, and is not "
            f"counted: {differences}"
        )
    return replace(crossval, warnings=(*crossval.warnings, *warnings))
