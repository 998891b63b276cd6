"""Cross-validation results as a table for the terminal, as `cross_validation.json` and as `folds.csv`."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from medconv.evaluation.cross_validation import CSV, JSON, CrossValidation
from medconv.evaluation.rendering import plain_number
from medconv.utils.atomic_io import write_text


def table(crossval: CrossValidation) -> str:
    """Scores of each fold and of all cases together, and the means of the folds' scores."""
    targets, entry = crossval.targets, plain(crossval)
    names = [name for name, _ in targets.score_columns(entry["folds"][0]["scores"])]
    rows: list[tuple[str, Any, list[Any]]] = [
        (f"fold {fold['fold']}", fold["cases"], [v for _, v in targets.score_columns(fold["scores"])])
        for fold in entry["folds"]
    ]
    lines, count = targets.over_folds_lines(entry, len(crossval.cases)), len(crossval.cases)
    rows += [(title, "" if number else count, values) for number, (title, values) in enumerate(lines)]
    widths = [max(7, len(name)) for name in names]
    total = len(crossval.folds) + len(crossval.missing)
    label = f": {crossval.label}" if crossval.label else ""
    return "\n".join(
        [
            f"cross-validation, {len(crossval.folds)} of {total} folds{label}",
            _line(targets.score_title, "cases", names, widths),
            *(_line(title, count, map(plain_number, values), widths) for title, count, values in rows),
            *(f"warning: {warning}" for warning in crossval.warnings),
        ]
    )


def plain(crossval: CrossValidation) -> dict[str, Any]:
    """One entry of `cross_validation.json`; `mean`, `per_class` and `cases` are as `evaluate` writes them."""
    targets, folds = crossval.targets, crossval.folds
    return {
        **{key: getattr(crossval, key) for key in ("key", "label", "missing")},
        "warnings": list(crossval.warnings),
        "targets": targets.plain(),
        "folds": [
            {"fold": f.number, "folder": f.name, "cases": len(f.rows), "scores": targets.summary(f.rows)}
            for f in folds
        ],
        **targets.over_folds([fold.rows for fold in folds]),
        "cases": [
            {"case": case, "fold": fold, **targets.case_entry(row)} for fold, case, row in crossval.cases
        ],
    }


def write(home: Path, crossvals: Sequence[CrossValidation]) -> Path:
    """Write `cross_validation.json`, and the cases as `folds.csv`, into the runs' folder; returns the
    first.
    """
    entries = [plain(crossval) for crossval in crossvals]
    write_text(home / JSON, json.dumps({"crossvalidations": entries}, indent=2) + "\n")
    write_text(home / CSV, _csv_text(crossvals))
    return home / JSON


def _csv_text(crossvals: Sequence[CrossValidation]) -> str:
    """A row per case, with the columns of all targets."""
    rows = [
        {"crossvalidation": crossval.label, "fold": fold, "case": case, **crossval.targets.case_cells(row)}
        for crossval in crossvals
        for fold, case, row in crossval.cases
    ]
    text, columns = io.StringIO(newline=""), dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _line(name: str, count: Any, values: Iterable[str], widths: Sequence[int]) -> str:
    cells = (f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
    return f"  {name:<16}{count:>6}  {'  '.join(cells)}"
