"""Cross-validation of classification and regression: scores of each fold, and of all cases together."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medconv.evaluation.cross_validation import Fold
from medconv.metrics import image_level
from medconv.metrics.statistics import describe
from medconv.targets.image_level import ImageLevelTargets


def plain(image_targets: ImageLevelTargets, runs: Sequence[Fold]) -> dict[str, Any]:
    """`mean` and `intervals` are over all cases together, each predicted by the network that was not
    trained on it; `mean_of_folds` is the mean of the folds' scores."""
    folds: dict[str, dict[str, Any]] = {run.number: run.rows for run in runs}
    folders = {run.number: run.name for run in runs}
    outputs, values = _arrays(image_targets, [row for rows in folds.values() for row in rows.values()])
    scores = {
        number: image_level.measure(image_targets, *_arrays(image_targets, list(rows.values())))
        for number, rows in folds.items()
    }
    return {
        "targets": image_targets.plain(),
        "folds": [
            {"fold": number, "folder": folders[number], "cases": len(folds[number]), "scores": scores[number]}
            for number in folds
        ],
        "mean": image_level.measure(image_targets, outputs, values),
        "intervals": {
            name: list(ends) for name, ends in image_level.intervals(image_targets, outputs, values).items()
        },
        "mean_of_folds": {
            name: describe([fold_scores[name] for fold_scores in scores.values()])["mean"]
            for name in image_targets.metric_names
        },
        "per_class": image_targets.per_name(outputs, values),
        "cases": [
            {"case": case, "fold": number, **row}
            for number, rows in folds.items()
            for case, row in rows.items()
        ],
    }


def table(image_targets: ImageLevelTargets, runs: Sequence[Fold]) -> list[str]:
    """Lines: the folds, all cases together, the mean of the folds, and the interval over all cases."""
    summary = plain(image_targets, runs)
    names = list(summary["mean"])
    width = max(map(len, names)) + 2
    rows = [(f"fold {fold['fold']}", fold["cases"], fold["scores"]) for fold in summary["folds"]]
    rows.append(("all cases", len(summary["cases"]), summary["mean"]))
    rows.append(("mean of folds", "", summary["mean_of_folds"]))
    for index, end in enumerate(("from", "to")):
        rows.append((f"95 % {end}", "", {name: ends[index] for name, ends in summary["intervals"].items()}))
    header = f"  {'':<16}{'cases':>6}" + "".join(f"{name:>{width}}" for name in names)
    return [
        header,
        *(
            f"  {n:<16}{count:>6}" + "".join(f"{_number(s.get(k)):>{width}}" for k in names)
            for n, count, s in rows
        ),
    ]


def csv_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """`folds.csv`: a row per case, with its true values and outputs. Entries whose targets differ from
    those of the first image-level entry are skipped. Empty: no entry is image-level.
    """
    entries = [entry for entry in entries if "targets" in entry]
    entries = [entry for entry in entries if entry["targets"] == entries[0]["targets"]]
    if not entries:
        return ""
    text, names = io.StringIO(newline=""), entries[0]["targets"]["names"]
    values = ImageLevelTargets.from_plain(entries[0]["targets"]).value_names
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["crossvalidation", "fold", "case", *(f"truth/{n}" for n in values), *(f"output/{n}" for n in names)]
    )
    for entry in entries:
        for row in entry["cases"]:
            writer.writerow([entry["label"], row["fold"], row["case"], *row["values"], *row["outputs"]])
    return text.getvalue()


def _arrays(
    image_targets: ImageLevelTargets, rows: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    outputs, values = (np.array([row[key] for row in rows], float) for key in ("outputs", "values"))
    return outputs.reshape(len(rows), image_targets.num_outputs), values.reshape(
        len(rows), image_targets.num_values
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
