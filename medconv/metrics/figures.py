"""Figures of matplotlib as pictures: (height, width, 3) uint8.

Only matplotlib's objects, not its global state, so that any thread may draw. Names come from files, so no
text is parsed as a formula.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 100
_PANELS_PER_ROW = 3
_PANEL_INCHES = 4.0
_MAX_LETTERS = 24  # of a name


def one_panel(width: float = 5.0, height: float = 4.6) -> tuple[Figure, Any]:
    """A figure and its axes. Args: width, height: inches."""
    figure = _figure(width, height)
    return figure, figure.subplots()


def stacked(height_ratios: Sequence[int]) -> tuple[Figure, Any]:
    """A figure with panels below each other, which share the horizontal axis."""
    figure = _figure(width=5.0, height=4.6)
    return figure, figure.subplots(len(height_ratios), 1, sharex=True, height_ratios=height_ratios)


def panel_grid(panels: int) -> tuple[Figure, Any]:
    """A figure with as many square panels, three a row."""
    columns = min(_PANELS_PER_ROW, panels)
    rows = ceil(panels / _PANELS_PER_ROW)
    figure = _figure(_PANEL_INCHES * columns, _PANEL_INCHES * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    # the last row may have empty panels
    for axes in grid[panels:]:
        axes.set_axis_off()
    return figure, grid[:panels]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # takes half a second: only commands with plots import it

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def pixels(figure: Figure) -> np.ndarray:
    """A figure as it is drawn. Shape: (height, width, 3), uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box
        warnings.simplefilter("ignore")
        canvas.draw()
    rgba = np.asarray(canvas.buffer_rgba())
    return np.ascontiguousarray(rgba[..., :3])


def add_legend(axes: Any, hidden_curves: int, undefined: Sequence[str]) -> None:
    """A legend of the curves, with notes below. Args: undefined: names of curves that could not be drawn."""
    notes = []
    if hidden_curves > 0:
        notes.append(f"and {hidden_curves} more")
    if undefined:
        names = ", ".join(map(text, undefined[:3]))
        ellipsis = ", …" if len(undefined) > 3 else ""
        notes.append(f"undefined: {names}{ellipsis}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="best")
    axes.text(0.98, 0.02, "\n".join(notes), transform=axes.transAxes, ha="right", fontsize=8)


def matrix_inches(names: int) -> float:
    """The edge of a matrix with so many rows or columns."""
    return min(2.6 + 0.45 * names, 14.0)


def text(name: str) -> str:
    """A name from a file: on one line, shortened, and not parsed as a formula."""
    line = " ".join(str(name).split())
    short = line if len(line) <= _MAX_LETTERS else line[: _MAX_LETTERS - 1] + "…"
    return short.replace("$", r"\$")
