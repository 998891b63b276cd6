"""Chart of what convolutions gain over plain ones, a panel per data set, as an SVG drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.dice_curves import COLOURS
from benchmarks.results import Row
from medconv.utils.atomic_io import write_text

_WIDTH = 36  # characters of a label, then a new line


def draw(rows: Sequence[Row], path: Path) -> None:
    """Points of Dice (hundredths) gained, with their intervals, a line for each case of `learning`.

    A data set with one case has a line for each convolution.
    Raises: ValueError: there is nothing but plain convolutions.
    """
    drawn = [row for row in rows if row["variant"] != row["reference"] and row["low"] is not None]
    if not drawn:
        raise ValueError(f"{path}: there is no convolution yet with two seeds, to compare with plain ones")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    variants, names = (list(dict.fromkeys(row[key] for row in drawn)) for key in ("variant", "data"))
    panels = [[row for row in drawn if row["data"] == name] for name in names]
    sizes = [len(_lines(rows)) for rows in panels]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 1 + 0.5 * sum(sizes) + 0.5 * len(names)), layout="constrained")
        for axes, name, rows in zip(
            figure.subplots(len(names), 1, squeeze=False, height_ratios=sizes).flat,
            names,
            panels,
            strict=True,
        ):
            _panel(axes, rows, variants)
            title = name if _compares_cases(rows) else f"{name}: {_line(rows[0])}"
            axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("points of Dice over plain convolutions, 95 % interval")
        if any(_compares_cases(rows) for rows in panels):
            figure.legend(
                *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
            )
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    write_text(path, content.getvalue())


def _panel(axes: Any, rows: Sequence[Row], variants: Sequence[str]) -> None:
    lines = _lines(rows)
    compares_cases = _compares_cases(rows)
    axes.axvline(0, color="#888888", linewidth=1)
    for number, variant in enumerate(variants):
        chosen = [row for row in rows if row["variant"] == variant]
        shift = 0.18 * (number - (len(variants) - 1) / 2) if compares_cases else 0.0
        means, lows, highs = ([100 * row[key] for row in chosen] for key in ("difference", "low", "high"))
        axes.errorbar(
            means,
            [lines.index(_line(row) if compares_cases else _arm(row)) + shift for row in chosen],
            xerr=[
                [mean - low for mean, low in zip(means, lows, strict=True)],
                [high - mean for mean, high in zip(means, highs, strict=True)],
            ],
            fmt="o",
            capsize=3,
            color=COLOURS[number % len(COLOURS) if compares_cases else 0],
            label=variant,
        )
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(axis="x", color="#e2e2e2")


def _compares_cases(rows: Sequence[Row]) -> bool:
    return len({_line(row) for row in rows}) > 1


def _lines(rows: Sequence[Row]) -> list[str]:
    of_row = _line if _compares_cases(rows) else _arm
    return list(dict.fromkeys(map(of_row, rows)))


def _arm(row: Row) -> str:
    return f"{row['variant']}, {row['seeds']} seeds"


def _line(row: Row) -> str:
    return fill(str(row["case"]).replace(" training", ""), _WIDTH)
