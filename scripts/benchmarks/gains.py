"""Chart of what convolutions gain over plain ones, a panel per data set, as an SVG drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from benchmarks.dice_curves import COLOURS
from benchmarks.results import Row
from medconv.utils.atomic_io import write_text


def draw(rows: Sequence[Row], path: Path) -> None:
    """Points of Dice (hundredths) gained, with their intervals, a line for each case of `learning`.

    Raises: ValueError: there is nothing but plain convolutions.
    """
    drawn = [row for row in rows if row["variant"] != row["reference"] and row["difference"] is not None]
    if not drawn:
        raise ValueError(f"{path}: there is no convolution to compare with plain ones yet")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    variants, lines = (list(dict.fromkeys(key(row) for row in drawn)) for key in (_variant, _line))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 1.2 + 0.5 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color="#888888", linewidth=1)
        for number, variant in enumerate(variants):
            chosen = [row for row in drawn if _variant(row) == variant]
            shift = 0.18 * (number - (len(variants) - 1) / 2)
            means, lows, highs = ([100 * row[key] for row in chosen] for key in ("difference", "low", "high"))
            axes.errorbar(
                means,
                [lines.index(_line(row)) + shift for row in chosen],
                xerr=[
                    [mean - low for mean, low in zip(means, lows, strict=True)],
                    [high - mean for mean, high in zip(means, highs, strict=True)],
                ],
                fmt="o",
                capsize=3,
                color=COLOURS[number % len(COLOURS)],
                label=variant,
            )
        axes.set_yticks(range(len(lines)), lines)
        axes.invert_yaxis()
        axes.grid(axis="x", color="#e2e2e2")
        axes.set_xlabel("points of Dice over plain convolutions, 95 % interval")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    write_text(path, content.getvalue())


def _variant(row: Row) -> str:
    return str(row["variant"])


def _line(row: Row) -> str:
    return f"{row['data']}, {row['case'].replace(' training', '')}"
