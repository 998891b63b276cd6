"""Cross-validation: what the runs of a folder say together, each of which validated on a fold of its own."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from medconv.config import flatten
from medconv.evaluation import image_level_folds
from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import Row, mean_per_class
from medconv.metrics.statistics import describe
from medconv.targets.image_level import ImageLevelTargets
from medconv.training.run_dir import FREE, RunDir, short_hash
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some

JSON, CSV = "cross_validation.json", "folds.csv"
_MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}$")  # by run.resume=never
_NUMBER = re.compile(r"[0-9]{1,4}")
_FACTS = (
    "train_cases",
    "num_train_cases",
    "class_counts",
    "value_means",
    "value_stds",
    "memory_gb",
)  # the last: machine's
_PER_FOLD = ("data.fold", "loss.class_counts", "loss.num_cases", *(f"derived.{key}" for key in _FACTS))


@dataclass(frozen=True)
class Fold:
    """One run. Args: values: its config, flat. rows: case id to Dice per class, of its best checkpoint."""

    number: str
    folder: RunDir
    values: dict[str, Any]
    status: str
    rows: dict[str, Row]
    skipped: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def classes(self) -> tuple[str, ...]:
        """Of what it validated."""
        return tuple(next(iter(self.rows.values()), {}))

    @property
    def done(self) -> bool:
        return self.status == "done" and bool(self.rows)


@dataclass(frozen=True)
class CrossValidation:
    """Runs whose configs differ in `data.fold` alone.

    Args: label: the overrides that tell it from the others of a sweep. folds: those that are done. missing:
        fold to its state, of the others.
    """

    key: str
    label: str
    folds: tuple[Fold, ...]
    missing: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def image_targets(self) -> ImageLevelTargets | None:
        """What was asked of whole images; None: label maps."""
        content = {key: self.folds[0].values.get(f"derived.image_targets.{key}") for key in ("kind", "names")}
        return None if content["kind"] is None else ImageLevelTargets.from_plain(content)

    @property
    def cases(self) -> list[tuple[str, str, Row]]:
        """(fold, case, Dice per class, or outputs and values) of every validated case."""
        return [(fold.number, case, row) for fold in self.folds for case, row in fold.rows.items()]


def read(home: Path, labels: Mapping[Path, str] | None = None, least: int = 2) -> list[CrossValidation]:
    """The cross-validations among the run folders in a folder, of at least `least` folds, one of them done.

    Args: labels: run folder to the overrides that tell its cross-validation from others; else as an earlier
    `write` had it.
    """
    known = {one["key"]: one["label"] for one in _written(home)}
    groups: dict[str, list[Fold]] = {}
    for fold in _runs(home):
        groups.setdefault(short_hash(_identity(fold)), []).append(fold)
    found = []
    for key, runs in groups.items():
        if len({fold.number for fold in runs}) >= least and any(fold.done for fold in runs):
            said = [labels[fold.folder.path] for fold in runs if labels and fold.folder.path in labels]
            found.append(_group(key, said[0] if said else known.get(key, ""), runs))
    return [_set_apart(one, found) for one in found]


def table(found: CrossValidation) -> str:
    """Dice per class of each fold; over all cases mean and sd; the mean of the folds' means; or scores of
    whole images.
    """
    if found.image_targets is not None:
        lines = image_level_folds.lines(found.image_targets, found.folds)
        return "\n".join([_title(found), *lines, *(f"warning: {warning}" for warning in found.warnings)])
    summary = plain(found)
    classes = list(summary["per_class"])
    widths = [max(7, len(name)) for name in (*classes, "mean")]
    per_class = [*summary["per_class"].values(), summary["mean"]]
    rows = [(f"fold {f['fold']}", f["cases"], [*f["dice"].values(), f["mean"]]) for f in summary["folds"]]
    rows.append(("all cases, mean", len(summary["cases"]), [value["dice"] for value in per_class]))
    rows.append(("all cases, sd", "", [value["sd"] for value in per_class]))
    rows.append(("mean of folds", "", [value["mean_of_folds"] for value in per_class]))
    lines = [_title(found), _line("Dice", "cases", [*classes, "mean"], widths)]
    lines += [_line(name, count, [_number(v) for v in values], widths) for name, count, values in rows]
    if any(value["n"] < len(summary["cases"]) for value in summary["per_class"].values()):
        counts = [str(value["n"]) for value in per_class]
        lines.append(_line("defined in", "", counts, widths))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found.warnings)])


def plain(found: CrossValidation) -> dict[str, Any]:
    """As `cross_validation.json` holds it; `mean`, `per_class` and `cases` as in what `evaluate` writes."""
    said = {key: getattr(found, key) for key in ("key", "label", "missing")} | {
        "warnings": list(found.warnings)
    }
    if found.image_targets is not None:
        return {**said, **image_level_folds.plain(found.image_targets, found.folds)}
    rows = [row for _, _, row in found.cases]
    folds = [_fold(fold) for fold in found.folds]
    classes = list(mean_per_class(rows))
    per_class = {
        name: _over_cases([r.get(name) for r in rows], [f["dice"].get(name) for f in folds])
        for name in classes
    }
    mean = _over_cases([metrics_dice.mean(row) for row in rows], [f["mean"] for f in folds])
    mean["dice"] = metrics_dice.mean(
        {name: value["dice"] for name, value in per_class.items()}
    )  # as in summary.json
    return {
        **said,
        "folds": folds,
        "mean": mean,
        "per_class": per_class,
        "cases": [{"case": case, "fold": fold, "dice": row} for fold, case, row in found.cases],
    }


def write(home: Path, found: Sequence[CrossValidation]) -> Path:
    """`cross_validation.json`, and the cases as `folds.csv`, into the runs' folder; returns the first."""
    content = [plain(one) for one in found]
    write_text(home / JSON, json.dumps({"crossvalidations": content}, indent=2) + "\n")
    classes = list(dict.fromkeys(name for one in content for name in one["per_class"]))
    writer = csv.writer(text := io.StringIO(newline=""), lineterminator="\n")
    writer.writerow(["crossvalidation", "fold", "case", *(f"dice/{name}" for name in classes)])
    for one in (one for one in content if "image_targets" not in one):
        for row in one["cases"]:
            writer.writerow(
                [one["label"], row["fold"], row["case"], *(row["dice"].get(name) for name in classes)]
            )
    write_text(home / CSV, image_level_folds.table_of(content) or text.getvalue())
    return home / JSON


def _runs(home: Path) -> Iterator[Fold]:
    """The runs in a folder that validate on a fold, in order."""
    for path in sorted(home.iterdir()) if home.is_dir() else []:
        if not (path / "config.yaml").is_file() or _MOVED_ASIDE.search(path.name):
            continue
        folder, values = RunDir(path), _config(path / "config.yaml")
        if str(values.get("data.fold", "all")) != "all":
            _check_folds(values, path / "config.yaml")
            summary = folder.summary()
            status = str(summary.get("status") or "not begun")
            rows, skipped = summary.get("val/cases") or {}, summary.get("skipped_cases") or {}
            yield Fold(str(values["data.fold"]), folder, values, status, rows, skipped)


def _config(path: Path) -> dict[str, Any]:
    try:
        return flatten(OmegaConf.to_container(OmegaConf.load(path)))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"{path}: not a readable config ({' '.join(str(error).split())})") from error


def _check_folds(values: Mapping[str, Any], path: Path) -> None:
    """Raises: ValueError: no number of folds, or of one of them, which becomes part of a folder's name."""
    fold, count = values["data.fold"], values.get("data.num_folds")
    if not _NUMBER.fullmatch(str(fold)):
        raise ValueError(f"{path}: data.fold must be `all` or a number, got {fold!r:.80}")
    if values.get("data.splits_file") is None and not _NUMBER.fullmatch(str(count)):
        raise ValueError(f"{path}: data.num_folds must be a number of folds, got {count!r:.80}")


def _identity(fold: Fold) -> dict[str, Any]:
    """What the folds of one cross-validation have in common; what came of the data (`derived`) is compared
    later.
    """
    apart = (*_PER_FOLD, "derived")
    return {k: v for k, v in fold.values.items() if k not in apart and not k.startswith(("derived.", *FREE))}


def _group(key: str, label: str, runs: Sequence[Fold]) -> CrossValidation:
    done: dict[str, Fold] = {}
    warnings = []
    for fold in sorted(
        runs, key=lambda fold: (fold.folder.path / "summary.json").stat().st_mtime if fold.done else 0
    ):
        if fold.done and fold.number in done:
            warnings.append(
                f"fold {fold.number} was trained twice; {fold.name} counts, {done[fold.number].name} does not"
            )
        if fold.done:
            done[fold.number] = fold
    states, expected = {fold.number: fold.status for fold in runs}, _expected(runs[0].values)
    first = min(done, key=_place, default="")
    for number in [number for number in done if done[number].classes != done[first].classes]:
        states[number] = f"other classes: {', '.join(done.pop(number).classes)}"
    folds = tuple(done[number] for number in sorted(done, key=_place))
    missing = {
        n: states.get(n, "not there")
        for n in sorted({*states, *(expected or ())}, key=_place)
        if n not in done
    }
    if expected is None:
        splits = runs[0].values["data.splits_file"]
        warnings.append(
            f"data.splits_file={splits} cannot be read, so that folds may be missing that nothing here tells "
            "of"
        )
    if missing:
        said = ", ".join(
            f"{number} ({'stopped' if state == 'running' else state})" for number, state in missing.items()
        )
        count = sum(len(fold.rows) for fold in folds)
        warnings.append(
            f"without fold {said}: means are over {count} cases of fold {', '.join(f.number for f in folds)}"
        )
    return CrossValidation(key, label, folds, missing, (*warnings, *_disagreements(folds)))


def _disagreements(folds: Sequence[Fold]) -> Iterator[str]:
    """Warnings of what the folds of one cross-validation should have in common and have not."""
    where: dict[str, list[str]] = {}
    for fold in folds:
        for case in fold.rows:
            where.setdefault(case, []).append(fold.number)
    twice = [f"{case} (fold {' and '.join(numbers)})" for case, numbers in where.items() if len(numbers) > 1]
    if twice:
        yield f"{some(twice)}: validated more than once, and counted as often"
    for fold in folds[1:]:
        differing = _difference(folds[0], fold)
        if differing:
            yield (
                f"fold {folds[0].number} and fold {fold.number}: the data was prepared in two ways: "
                f"{some(differing)}"
            )
    skipped = sorted({case for fold in folds for case in fold.skipped})
    if skipped:
        yield f"{some(skipped)}: left out as faulty by data.on_invalid_case=skip, and so not validated"


def _set_apart(one: CrossValidation, found: Sequence[CrossValidation]) -> CrossValidation:
    """With a warning where another one has the folds that it lacks: was it meant to be the same?"""
    warnings = []
    numbers = {fold.number for fold in one.folds}
    for other in found:
        theirs = {fold.number for fold in other.folds}
        if other is not one and one.missing and other.missing and not numbers & theirs:
            differing = some(_difference(one.folds[0], other.folds[0]))
            warnings.append(
                f"fold {', '.join(sorted(theirs))} was trained with another config, and is not counted: "
                f"{differing}"
            )
    return CrossValidation(one.key, one.label, one.folds, one.missing, (*one.warnings, *warnings))


def _difference(one: Fold, other: Fold) -> list[str]:
    keys = (k for k in sorted({*one.values, *other.values}) if k not in _PER_FOLD and not k.startswith(FREE))
    return [
        f"{k}={one.values.get(k)} and {other.values.get(k)}"
        for k in keys
        if one.values.get(k) != other.values.get(k)
    ]


def _expected(values: Mapping[str, Any]) -> list[str] | None:
    """The folds that there are to be; None where the file that says so cannot be read."""
    if values.get("data.splits_file") is None:
        return [str(number) for number in range(int(values["data.num_folds"]))]
    try:
        path = Path(values["data.splits_file"])
        return (
            [str(number) for number in range(len(json.loads(path.read_text())))] if path.is_file() else None
        )
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _written(home: Path) -> list[dict[str, Any]]:
    """What an earlier `write` left there."""
    try:
        content = json.loads((home / JSON).read_text(encoding="utf-8"))["crossvalidations"]
        return [one for one in content if {"key", "label"} <= set(one)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _fold(fold: Fold) -> dict[str, Any]:
    dice = mean_per_class(list(fold.rows.values()))
    return {
        "fold": fold.number,
        "folder": fold.name,
        "cases": len(fold.rows),
        "dice": dice,
        "mean": metrics_dice.mean(dice),
    }


def _over_cases(values: Sequence[float | None], of_folds: Sequence[float | None]) -> dict[str, Any]:
    found = describe(values)
    kept = {key: found[key] for key in ("sd", "n", "low", "high")}
    return {"dice": found["mean"], **kept, "mean_of_folds": describe(of_folds)["mean"]}


def _title(found: CrossValidation) -> str:
    total = len(found.folds) + len(found.missing)
    return f"cross-validation, {len(found.folds)} of {total} folds" + (
        f": {found.label}" if found.label else ""
    )


def _line(name: str, count: Any, values: Sequence[str], widths: Sequence[int]) -> str:
    return f"  {name:<16}{count:>6}  " + "  ".join(
        f"{v:>{width}}" for v, width in zip(values, widths, strict=True)
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _place(number: str) -> tuple[int, str]:
    return (int(number), "") if number.isdecimal() else (2**31, number)
