"""What the folds of a cross-validation on whole images say together: scores of each, and of all their
cases at once.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from medconv.metrics import image_level
from medconv.metrics.statistics import describe
from medconv.targets.image_level import ImageLevelTargets


class Fold(Protocol):
    """A run. Args: rows: case to `outputs` and `values`."""

    @property
    def number(self) -> str: ...

    @property
    def rows(self) -> dict[str, Any]: ...

    @property
    def name(self) -> str: ...


def plain(image_targets: ImageLevelTargets, runs: Sequence[Fold]) -> dict[str, Any]:
    """`mean` and `intervals` are those of all cases together, each answered by the network that was not
    trained on it; `mean_of_folds` the mean of the folds' scores."""
    folds, folders = {run.number: run.rows for run in runs}, {run.number: run.name for run in runs}
    outputs, values = _arrays(image_targets, [row for rows in folds.values() for row in rows.values()])
    scores = {
        number: image_level.measure(image_targets, *_arrays(image_targets, list(rows.values())))
        for number, rows in folds.items()
    }
    return {
        "image_targets": image_targets.plain(),
        "folds": [
            {"fold": number, "folder": folders[number], "cases": len(folds[number]), "scores": scores[number]}
            for number in folds
        ],
        "mean": image_level.measure(image_targets, outputs, values),
        "intervals": {
            name: list(ends) for name, ends in image_level.intervals(image_targets, outputs, values).items()
        },
        "mean_of_folds": {
            name: describe([one[name] for one in scores.values()])["mean"]
            for name in image_level.METRICS[image_targets.kind]
        },
        "per_class": image_level.per_name(image_targets, outputs, values),
        "cases": [
            {"case": case, "fold": number, **row}
            for number, rows in folds.items()
            for case, row in rows.items()
        ],
    }


def lines(image_targets: ImageLevelTargets, runs: Sequence[Fold]) -> list[str]:
    """A row for each fold, for all cases together with the interval, and for the mean of the folds."""
    found = plain(image_targets, runs)
    names = list(found["mean"])
    width = max(map(len, names)) + 2
    rows = [(f"fold {one['fold']}", one["cases"], one["scores"]) for one in found["folds"]]
    rows += [("all cases", len(found["cases"]), found["mean"]), ("mean of folds", "", found["mean_of_folds"])]
    for place, end in enumerate(("from", "to")):
        rows.append((f"95 % {end}", "", {name: ends[place] for name, ends in found["intervals"].items()}))
    head = f"  {'':<16}{'cases':>6}" + "".join(f"{name:>{width}}" for name in names)
    return [
        head,
        *(
            f"  {n:<16}{count:>6}" + "".join(f"{_number(s.get(k)):>{width}}" for k in names)
            for n, count, s in rows
        ),
    ]


def table_of(content: Sequence[Mapping[str, Any]]) -> str:
    """`folds.csv`: a row per case, its values and outputs; of those of the first such outcome. Empty:
    there is none.
    """
    content = [one for one in content if "image_targets" in one]
    content = [one for one in content if one["image_targets"] == content[0]["image_targets"]]
    if not content:
        return ""
    text, names = io.StringIO(newline=""), content[0]["image_targets"]["names"]
    values = ["class"] if content[0]["image_targets"]["kind"] == "multiclass" else names
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["crossvalidation", "fold", "case", *(f"truth/{n}" for n in values), *(f"output/{n}" for n in names)]
    )
    for one in content:
        for row in one["cases"]:
            writer.writerow([one["label"], row["fold"], row["case"], *row["values"], *row["outputs"]])
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
