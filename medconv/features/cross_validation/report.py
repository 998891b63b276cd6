"""Cross-validation results as a table for the terminal, as `cross_validation.json` and as `folds.csv`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from medconv.evaluation.results import plain_number
from medconv.features.cross_validation.results import CSV, JSON, CrossValidation
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text


def table(crossval: CrossValidation) -> str:
    """Scores of each fold and of all cases together, and the means of the folds' scores."""
    targets = crossval.targets
    entry = plain(crossval)
    folds = entry["folds"]
    names = [name for name, _ in targets.scores.columns(folds[0]["scores"])]
    widths = [max(7, len(name)) for name in names]  # 7: such as -0.1234
    total = len(crossval.folds) + len(crossval.missing)
    label = f": {crossval.label}" if crossval.label else ""
    lines = [
        f"cross-validation, {len(crossval.folds)} of {total} folds{label}",
        _line(targets.scores.title, "cases", names, widths),
    ]
    for fold in folds:
        values = [plain_number(value) for _, value in targets.scores.columns(fold["scores"])]
        lines.append(_line(f"fold {fold['fold']}", fold["cases"], values, widths))
    count: Any = len(crossval.cases)
    for title, scores in targets.scores.over_folds_lines(entry, len(crossval.cases)):
        lines.append(_line(title, count, map(plain_number, scores), widths))
        count = ""  # only in the first line: the number is the same in all
    lines += [f"warning: {warning}" for warning in crossval.warnings]
    return "\n".join(lines)


def plain(crossval: CrossValidation) -> dict[str, Any]:
    """One entry of `cross_validation.json`; `mean`, `per_class` and `cases` are as `evaluate` writes them."""
    targets = crossval.targets
    folds = [
        {
            "fold": fold.number,
            "folder": fold.name,
            "cases": len(fold.rows),
            "scores": targets.scores.summary(fold.rows),
        }
        for fold in crossval.folds
    ]
    cases = []
    for fold_number, case, row in crossval.cases:
        cases.append({"case": case, "fold": fold_number, **targets.scores.case_entry(row)})
    return {
        "key": crossval.key,
        "label": crossval.label,
        "missing": crossval.missing,
        "warnings": list(crossval.warnings),
        "targets": targets.plain(),
        "folds": folds,
        **targets.scores.over_folds([fold.rows for fold in crossval.folds]),
        "cases": cases,
    }


def write(home: Path, crossvals: Sequence[CrossValidation]) -> Path:
    """Write `cross_validation.json`, and the cases as `folds.csv`, into the runs' folder; returns the
    first.
    """
    entries = [plain(crossval) for crossval in crossvals]
    content = {"crossvalidations": entries}
    write_text(home / JSON, json.dumps(content, indent=2) + "\n")
    write_text(home / CSV, _csv_text(crossvals))
    return home / JSON


def _csv_text(crossvals: Sequence[CrossValidation]) -> str:
    """A row per case, with the columns of all targets."""
    rows: list[dict[str, Any]] = []
    for crossval in crossvals:
        for fold_number, case, row in crossval.cases:
            identity = {"crossvalidation": crossval.label, "fold": fold_number, "case": case}
            rows.append(identity | crossval.targets.scores.case_cells(row))
    # the union of all columns, in order: cross-validations may have different classes
    columns = dict.fromkeys(column for row in rows for column in row)
    return csv_text([list(columns), *([row.get(column, "") for column in columns] for row in rows)])


def _line(title: str, count: Any, cells: Iterable[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
    return f"  {title:<16}{count:>6}  {'  '.join(padded)}"
