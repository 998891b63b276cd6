"""Whether the bounds of `medconv bound` held: in `medconv evaluate` of the same predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.data.io.manifest import LOWER_BOUNDS, read_manifest
from medconv.evaluation.results import plain_number
from medconv.evaluation.segmentation_results import CaseRow
from medconv.features.bound import bounds
from medconv.features.quality.predicted_quality import chart_of_classes

KEY = "bound"  # in the result of `medconv evaluate`


def measure(predictions: Path, cases: Sequence[CaseRow], names: Sequence[str]) -> dict[str, Any] | None:
    """By class: `n` bounds with a true Dice, the `share` in which they held, and how far below the true Dice
    they are on average, `width`; `wanted`: the share that was asked for. None: there is no `bounds.csv`, or
    it is of predictions that are others now.
    """
    path = predictions / bounds.FILE
    manifest = read_manifest(predictions)
    is_stale = bool(manifest) and LOWER_BOUNDS not in manifest
    rows = bounds.read(path) if path.is_file() and not is_stale else []
    if not rows:
        return None
    true = {row["case"]: row["dice"] for row in cases}
    lower = {(row.case, row.name): row.lower for row in rows}
    per_class: dict[str, Any] = {}
    pairs_of: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        pairs = []
        for case, dice in true.items():
            bound, truth = lower.get((case, name)), dice[name]
            if bound is not None and truth is not None:
                pairs.append((bound, truth))
        if not pairs:
            continue
        held = [truth >= bound for bound, truth in pairs]
        widths = [truth - bound for bound, truth in pairs]
        per_class[name] = {
            "n": len(pairs),
            "share": sum(held) / len(held),
            "width": sum(widths) / len(widths),
        }
        pairs_of[name] = pairs
    if not pairs_of:
        return None
    return {"wanted": rows[0].share, "per_class": per_class, "pairs": pairs_of}


def lines(measured: Mapping[str, Any]) -> list[str]:
    """For the terminal, a line per class."""
    texts = []
    for name, row in measured["per_class"].items():
        texts.append(
            f"{name}: the lower bound of Dice held in {round(row['share'] * row['n'])} of {row['n']} cases, "
            f"wanted {measured['wanted']}; true Dice minus bound {plain_number(row['width'])} on average"
        )
    return texts


def figure(result: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Title, chart and note, for the report."""
    pairs_of = result[KEY]["pairs"]

    def draw(axes: Any, name: str) -> tuple[Sequence[float], Sequence[float]]:
        lower = [bound for bound, _ in pairs_of[name]]
        true = [truth for _, truth in pairs_of[name]]
        colours = ["C3" if truth < bound else "C0" for bound, truth in pairs_of[name]]
        axes.scatter(true, lower, s=9, alpha=0.7, linewidths=0, c=colours)
        return true, lower

    wrong = 100 * (1 - result[KEY]["wanted"])
    note = f"a dot is a case; above the dotted line, in red, the bound did not hold: {wrong:.3g}% may do so"
    return "Lower bounds of Dice", chart_of_classes(list(pairs_of), "lower bound", draw), note
