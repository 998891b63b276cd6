"""The chart of `whole_body`: CPU seconds and memory, by the volume and by the number of classes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Row
from medconv.utils.atomic_io import write_text

# What a panel shows below, and what is the same for all of its rows.
_ACROSS = (("voxels", "million voxels", "classes"), ("classes", "classes", "voxels"))
_UPWARDS = (("seconds", "CPU seconds"), ("peak_gib", "GiB"))
_UNITS = {"voxels": 1e6, "classes": 1.0}
_COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the chart as an SVG; both axes are logarithmic."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(row["variant"] for row in rows))
    # Text stays text, and the same rows give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 6.5), layout="constrained")
        panels = figure.subplots(len(_UPWARDS), len(_ACROSS))
        for line, (upwards, y_label) in zip(panels, _UPWARDS, strict=True):
            for axes, (across, x_label, fixed) in zip(line, _ACROSS, strict=True):
                largest = max(row[fixed] for row in rows)
                for variant, colour in zip(variants, _COLOURS, strict=False):
                    chosen = [row for row in rows if row["variant"] == variant and row[fixed] == largest]
                    _plot(axes, chosen, across, upwards, variant, colour)
                axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
                axes.set_title(_title(fixed, largest), loc="left", fontsize=10)
                _ticks(axes, sorted({row[across] / _UNITS[across] for row in rows}))
        handles = panels[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    write_text(path, content.getvalue())


def _plot(axes: Any, rows: Sequence[Row], across: str, upwards: str, variant: str, colour: str) -> None:
    places = [row[across] / _UNITS[across] for row in rows]
    axes.plot(places, [row[upwards] for row in rows], marker="o", color=colour, label=variant)


def _ticks(axes: Any, values: Sequence[float]) -> None:
    """Below at each measured value, at the left at 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xticks(values, [f"{value:.3g}" for value in values])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#e2e2e2")


def _title(fixed: str, value: int) -> str:
    return f"{value} classes" if fixed == "classes" else f"{value / 1e6:.3g} million voxels"
