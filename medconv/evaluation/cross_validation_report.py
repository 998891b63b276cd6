"""Cross-validation results as a table for the terminal, as `cross_validation.json` and as `folds.csv`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.evaluation import cross_validation_image_level
from medconv.evaluation.cross_validation import CSV, JSON, CrossValidation, Fold
from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import mean_per_class
from medconv.metrics.statistics import describe
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.atomic_io import write_text


def table(crossval: CrossValidation) -> str:
    """Segmentation: Dice per class of each fold, mean and sd over all cases, and the mean of the folds'
    means. Image-level: scores of each fold and of all cases.
    """
    if isinstance(crossval.targets, ImageLevelTargets):
        lines = cross_validation_image_level.table(crossval.targets, crossval.folds)
        return "\n".join(
            [_title(crossval), *lines, *(f"warning: {warning}" for warning in crossval.warnings)]
        )
    summary = plain(crossval)
    classes = list(summary["per_class"])
    widths = [max(7, len(name)) for name in (*classes, "mean")]
    per_class = [*summary["per_class"].values(), summary["mean"]]
    rows = [(f"fold {f['fold']}", f["cases"], [*f["dice"].values(), f["mean"]]) for f in summary["folds"]]
    rows.append(("all cases, mean", len(summary["cases"]), [value["dice"] for value in per_class]))
    rows.append(("all cases, sd", "", [value["sd"] for value in per_class]))
    rows.append(("mean of folds", "", [value["mean_of_folds"] for value in per_class]))
    lines = [_title(crossval), _line("Dice", "cases", [*classes, "mean"], widths)]
    lines += [_line(name, count, [_number(v) for v in values], widths) for name, count, values in rows]
    if any(value["n"] < len(summary["cases"]) for value in summary["per_class"].values()):
        counts = [str(value["n"]) for value in per_class]
        lines.append(_line("defined in", "", counts, widths))
    return "\n".join([*lines, *(f"warning: {warning}" for warning in crossval.warnings)])


def plain(crossval: CrossValidation) -> dict[str, Any]:
    """One entry of `cross_validation.json`; `mean`, `per_class` and `cases` are as `evaluate` writes them."""
    header = {key: getattr(crossval, key) for key in ("key", "label", "missing")} | {
        "warnings": list(crossval.warnings)
    }
    if isinstance(crossval.targets, ImageLevelTargets):
        return {**header, **cross_validation_image_level.plain(crossval.targets, crossval.folds)}
    rows = [row for _, _, row in crossval.cases]
    folds = [_fold(fold) for fold in crossval.folds]
    classes = list(mean_per_class(rows))
    per_class = {
        name: _over_cases([r.get(name) for r in rows], [f["dice"].get(name) for f in folds])
        for name in classes
    }
    mean = _over_cases([metrics_dice.mean(row) for row in rows], [f["mean"] for f in folds])
    # As in summary.json: the mean over classes of each class's mean.
    mean["dice"] = metrics_dice.mean({name: value["dice"] for name, value in per_class.items()})
    return {
        **header,
        "folds": folds,
        "mean": mean,
        "per_class": per_class,
        "cases": [{"case": case, "fold": fold, "dice": row} for fold, case, row in crossval.cases],
    }


def write(home: Path, crossvals: Sequence[CrossValidation]) -> Path:
    """Write `cross_validation.json`, and the cases as `folds.csv`, into the runs' folder; returns the
    first.
    """
    entries = [plain(crossval) for crossval in crossvals]
    write_text(home / JSON, json.dumps({"crossvalidations": entries}, indent=2) + "\n")
    write_text(home / CSV, cross_validation_image_level.csv_text(entries) or _csv_text(entries))
    return home / JSON


def _csv_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """`folds.csv` of segmentation: a row per case, with its Dice per class."""
    classes = list(dict.fromkeys(name for entry in entries for name in entry["per_class"]))
    writer = csv.writer(text := io.StringIO(newline=""), lineterminator="\n")
    writer.writerow(["crossvalidation", "fold", "case", *(f"dice/{name}" for name in classes)])
    for entry in (entry for entry in entries if "targets" not in entry):
        for row in entry["cases"]:
            writer.writerow(
                [entry["label"], row["fold"], row["case"], *(row["dice"].get(name) for name in classes)]
            )
    return text.getvalue()


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
    statistics = describe(values)
    spread = {key: statistics[key] for key in ("sd", "n", "low", "high")}
    return {"dice": statistics["mean"], **spread, "mean_of_folds": describe(of_folds)["mean"]}


def _title(crossval: CrossValidation) -> str:
    total = len(crossval.folds) + len(crossval.missing)
    return f"cross-validation, {len(crossval.folds)} of {total} folds" + (
        f": {crossval.label}" if crossval.label else ""
    )


def _line(name: str, count: Any, values: Sequence[str], widths: Sequence[int]) -> str:
    return f"  {name:<16}{count:>6}  " + "  ".join(
        f"{v:>{width}}" for v, width in zip(values, widths, strict=True)
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
