"""Whether the bounds of `medconv bound` held: in `medconv evaluate` of the same predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any

from medconv.evaluation.results import plain_number
from medconv.evaluation.segmentation_results import CaseRow
from medconv.features.bound import bounds

KEY = "bound"  # in the result of `medconv evaluate`
_MAX_PANELS = 6  # of the chart, a class in each


def measure(predictions: Path, cases: Sequence[CaseRow], names: Sequence[str]) -> dict[str, Any] | None:
    """By class: `n` bounds with a true Dice, the `share` in which they held, and how far below the true Dice
    they are on average, `width`; `wanted`: the share that was asked for. None: there is no `bounds.csv`.
    """
    path = predictions / bounds.FILE
    rows = bounds.read(path) if path.is_file() else []
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
        held = [truth >= bound for bound, truth in pairs]
        widths = [truth - bound for bound, truth in pairs]
        per_class[name] = {
            "n": len(pairs),
            "share": sum(held) / len(held) if held else None,
            "width": sum(widths) / len(widths) if widths else None,
        }
        pairs_of[name] = pairs
    return {"wanted": rows[0].share, "per_class": per_class, "pairs": pairs_of}


def lines(measured: Mapping[str, Any]) -> list[str]:
    """For the terminal, a line per class."""
    texts = []
    for name, row in measured["per_class"].items():
        texts.append(
            f"{name}: the lower bound of Dice held in {plain_number(row['share'])} of {row['n']} cases, "
            f"wanted {measured['wanted']}; true Dice minus bound {plain_number(row['width'])} on average"
        )
    return texts


def figure(result: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Title, chart and note, for the report."""
    from matplotlib.figure import Figure  # takes half a second: only this chart needs it

    pairs_of = dict(list(result[KEY]["pairs"].items())[:_MAX_PANELS])
    columns, rows = min(3, len(pairs_of)), ceil(len(pairs_of) / 3)
    chart = Figure(figsize=(4 * columns, 4 * rows), dpi=100, layout="constrained")
    panels = chart.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(pairs_of) :]:
        axes.set_axis_off()
    for axes, (name, pairs) in zip(panels, pairs_of.items(), strict=False):
        lower, true = [bound for bound, _ in pairs], [truth for _, truth in pairs]
        missed = ["C3" if truth < bound else "C0" for bound, truth in pairs]
        axes.scatter(true, lower, s=9, alpha=0.7, linewidths=0, c=missed)
        ends = [*lower, *true] or [0.0, 1.0]
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.7", linestyle=":", linewidth=1)
        # not parsed as a formula
        axes.set(xlabel="truth", ylabel="lower bound", title=f"{name:.24}".replace("$", r"\$"))
    content = BytesIO()
    chart.savefig(content, format="png")
    wrong = 1 - result[KEY]["wanted"]
    note = f"a dot is a case; above the dotted line, in red, the bound did not hold: {wrong:.0%} may do so"
    return "Lower bounds of Dice", content.getvalue(), note
