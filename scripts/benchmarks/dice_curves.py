"""Chart of Dice against training time, one curve per training, as an SVG drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medconv.utils.atomic_io import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6fb8", "#d1495b", "#8a5a00", "#2e8b57", "#7a4fb5", "#444444", "#c2188b", "#00808a")
DASHES = ("-", "--", ":", "-.")
DICE_TICKS = (
    0,
    0.3,
    0.5,
    0.6,
    0.7,
    0.75,
    0.8,
    0.82,
    0.84,
    0.86,
    0.87,
    0.88,
    0.89,
    0.9,
    0.92,
    0.94,
    0.96,
    0.98,
    0.99,
    0.995,
)
SECONDS_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400)
MIN_SECONDS, MAX_DICE = (
    0.1,
    0.999,
)  # values beyond them are drawn there: their logarithms would leave the chart
MARGIN = 0.05  # of the axis, free at each end
LABEL_SIZE = (0.08, 0.05)  # a result's number, as parts of the chart's width and height
MIN_TICK_DISTANCE = 0.06  # of the axis, so that labels do not touch


@dataclass(frozen=True)
class Curve:
    """One training.

    Args:
        name: curves of one name share a colour.
        points: (seconds, Dice).
        result: the Dice at their end.
        published: a Dice of others, drawn as a dotted line across the chart.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    result: float
    published: float | None = None


def draw(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Write the chart as an SVG. Both axes are logarithmic: the time, and the distance of Dice from 1.

    Raises: ValueError: there is no curve.
    """
    if not curves:
        raise ValueError(f"{path}: there is no curve to draw yet")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and the same curves give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", parse_math=False)
        _scale(axes, curves)
        _plot(axes, curves)
        _legend(figure, axes, list(dict.fromkeys(curve.name for curve in curves)))
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content.getvalue())


def _plot(axes: Axes, curves: Sequence[Curve]) -> None:
    """A line with small dots for each curve and a large dot for its result."""
    names = list(dict.fromkeys(curve.name for curve in curves))
    labelled: list[np.ndarray] = []
    for curve in sorted(curves, key=lambda curve: -curve.result):
        number = names.index(curve.name)
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        seconds, dice = _clipped(curve.points)
        axes.plot(seconds, dice, marker=".", color=colour, linestyle=dashes, label=curve.name)
        if curve.published is not None:
            axes.axhline(min(curve.published, MAX_DICE), color=colour, linestyle=":", linewidth=1)
        end = (seconds[-1], min(curve.result, MAX_DICE))
        axes.plot(*end, marker="o", markersize=9, color=colour, linestyle="none")
        place = axes.transAxes.inverted().transform(axes.transData.transform(end))
        below = any((np.abs(place - other) < LABEL_SIZE).all() for other in labelled)
        labelled.append(place)
        _write_result(axes, curve.result, end, colour, below)


def _write_result(axes: Axes, result: float, end: tuple[float, float], colour: str, below: bool) -> None:
    """The number beside the large dot."""
    axes.annotate(
        f"{result:.3f}",
        end,
        xytext=(-7, -14 if below else 7),
        textcoords="offset points",
        horizontalalignment="right",
        fontweight="bold",
        color=colour,
    )


def _legend(figure: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Under the chart, each name once."""
    handles = {line.get_label(): line for line in axes.get_lines()}
    legend = figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=2, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # names may hold a dollar sign


def _scale(axes: Axes, curves: Sequence[Curve]) -> None:
    """Limits, ticks and scales of both axes."""
    points = [_clipped([*curve.points, (curve.points[-1][0], curve.result)]) for curve in curves]
    seconds, dice = np.concatenate([x for x, _ in points]), np.concatenate([y for _, y in points])
    axes.set(xlabel="training time", ylabel="mean foreground Dice, validation cases")
    axes.set_xscale("log")
    axes.set_yscale("function", functions=(_closeness, _dice))
    axes.minorticks_off()
    axes.grid(color="#e2e2e2")

    low, high = _limits(np.log(seconds))
    ticks = _spread(SECONDS_TICKS, np.log(SECONDS_TICKS), low, high)
    axes.set_xlim(np.exp(low), np.exp(high))
    axes.set_xticks(ticks, [f"{s:g} s" if s < 60 else f"{s / 60:g} min" for s in ticks])

    published = [min(curve.published, MAX_DICE) for curve in curves if curve.published is not None]
    low, high = _limits(_closeness(np.concatenate([dice, published])))
    ticks = _spread(DICE_TICKS, _closeness(np.array(DICE_TICKS)), low, high)
    axes.set_ylim(float(_dice(low)), float(_dice(high)))
    axes.set_yticks(ticks, [f"{d:g}" for d in ticks])


def _clipped(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and Dice of points, as they are drawn."""
    seconds, dice = np.array(points, dtype=float).T
    return np.maximum(seconds, MIN_SECONDS), np.minimum(dice, MAX_DICE)


def _closeness(dice: np.ndarray) -> np.ndarray:
    """How near Dice is to 1, as a logarithm: 0 at 0, 2.3 at 0.9, 4.6 at 0.99. matplotlib asks beyond the
    axis, too.
    """
    result: np.ndarray = -np.log(np.maximum(1 - np.asarray(dice), 1e-9))
    return result


def _dice(closeness: np.ndarray | float) -> np.ndarray:
    """The inverse of `_closeness`."""
    return 1 - np.exp(-np.asarray(closeness))


def _limits(values: np.ndarray) -> tuple[float, float]:
    """The ends of an axis that shows these values."""
    low, high = float(values.min()), float(values.max())
    free = MARGIN * max(high - low, 1e-3)
    return low - free, high + free


def _spread(ticks: Sequence[float], places: np.ndarray, low: float, high: float) -> list[float]:
    """The ticks that lie on the axis and far enough from the tick before."""
    chosen: list[tuple[float, float]] = []
    for tick, place in zip(ticks, places, strict=True):
        if low <= place <= high and (not chosen or place - chosen[-1][1] >= MIN_TICK_DISTANCE * (high - low)):
            chosen.append((tick, float(place)))
    return [tick for tick, _ in chosen]
