"""Curves of Dice against time as an SVG, without a plotting library; readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from medconv.atomic import write_text

WIDTH, HEIGHT = 860, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 46, 60  # margins; at the top the legend is added, two names a row
ROW = 24
COLOURS = ("#0b6fb8", "#d1495b", "#8a5a00", "#2e8b57", "#7a4fb5", "#444444", "#c2188b", "#00808a")
DASHES = ("", "7 3", "2 3", "10 3 2 3")
DICE_TICKS = (0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.87, 0.88, 0.89, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.995)
SECONDS_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400)
NEAREST = 30  # pixels between labels of an axis


@dataclass(frozen=True)
class Curve:
    """One training.

    Args: name: curves of one name share a colour. points: (seconds, Dice). result: the Dice at their end.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    result: float


def draw(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Time is logarithmic; Dice is spaced by the logarithm of its distance from 1, as curves differ near their best.

    Raises: ValueError: nothing to draw.
    """
    ends = [(curve.points[-1][0], curve.result) for curve in curves]
    points = [(max(t, 0.1), min(d, 0.999)) for t, d in [*ends, *(point for curve in curves for point in curve.points)]]
    if not points:
        raise ValueError(f"{path}: there is no curve to draw yet")
    times, errors = [math.log(t) for t, _ in points], [math.log(1 - d) for _, d in points]
    names = list(dict.fromkeys(curve.name for curve in curves))
    top = TOP + ROW * math.ceil(len(names) / 2)
    axes = _Axes(min(times), max(times), max(errors), min(errors), top)
    body = [*_frame(axes, title), *(line for c in curves for line in _curve(c, names.index(c.name), axes))]
    body += [line for number, name in enumerate(names) for line in _legend(number, name)]
    body += _results(curves, names, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    write_text(path, "\n".join([head + ' font-family="sans-serif" font-size="13">', *body, "</svg>"]) + "\n")


@dataclass(frozen=True)
class _Axes:
    """Limits as logarithms: of seconds, and of 1 - Dice from bottom to top; a twentieth is left free at each end."""

    first: float
    last: float
    worst: float
    best: float
    top: int

    def x(self, seconds: float) -> float:
        share = (math.log(max(seconds, 0.1)) - self.first) / max(self.last - self.first, 1e-6)
        return LEFT + (0.03 + 0.94 * share) * (WIDTH - LEFT - RIGHT)

    def y(self, dice: float) -> float:
        share = (self.worst - math.log(1 - min(dice, 0.999))) / max(self.worst - self.best, 1e-6)
        return HEIGHT - BOTTOM - (0.05 + 0.9 * share) * (HEIGHT - self.top - BOTTOM)


def _frame(axes: _Axes, title: str) -> list[str]:
    right, bottom, top = WIDTH - RIGHT, HEIGHT - BOTTOM, axes.top
    found = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>', _text(LEFT, 28, title, "start", "#111", 15)]
    for place, seconds in _spread([(axes.x(s), s) for s in SECONDS_TICKS], LEFT, right):
        found.append(_line(place, top, place, bottom))
        found.append(_text(place, bottom + 20, f"{seconds:g} s" if seconds < 60 else f"{seconds / 60:g} min", "middle"))
    for place, dice in _spread([(axes.y(d), d) for d in reversed(DICE_TICKS)], top, bottom):
        found.append(_line(LEFT, place, right, place))
        found.append(_text(LEFT - 8, place + 4, f"{dice:g}", "end"))
    size = f'width="{right - LEFT}" height="{bottom - top}"'
    found.append(f'<rect x="{LEFT}" y="{top}" {size} fill="none" stroke="#888"/>')
    found.append(_text((LEFT + right) / 2, HEIGHT - 16, "time of training", "middle"))
    turned = f'transform="rotate(-90 20 {(top + bottom) / 2})"'
    return [*found, _text(20, (top + bottom) / 2, "mean foreground Dice, validation cases", "middle", more=turned)]


def _spread(ticks: Sequence[tuple[float, float]], low: float, high: float) -> list[tuple[float, float]]:
    """Those inside of the frame and far enough from the one before, so that their labels do not touch."""
    found: list[tuple[float, float]] = []
    for place, value in ticks:
        if low <= place <= high and (not found or abs(place - found[-1][0]) >= NEAREST):
            found.append((place, value))
    return found


def _curve(curve: Curve, number: int, axes: _Axes) -> list[str]:
    places = [(axes.x(t), axes.y(d)) for t, d in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" {_stroke(number)}/>'
    dots = [(x, y, 2.6) for x, y in places] + [(places[-1][0], axes.y(curve.result), 5.5)]
    return [line, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{_colour(number)}"/>' for x, y, r in dots)]


def _results(curves: Sequence[Curve], names: Sequence[str], axes: _Axes) -> list[str]:
    """The number at each curve's end, above its dot, or below where another number is."""
    found: list[str] = []
    taken: list[tuple[float, float]] = []
    halo = 'font-weight="bold" stroke="#ffffff" stroke-width="4" paint-order="stroke"'
    for curve in sorted(curves, key=lambda c: -c.result):
        x, y = axes.x(curve.points[-1][0]) - 10, axes.y(curve.result)
        free = all(abs(x - a) > 44 or abs(y - 8 - b) > 14 for a, b in taken)
        taken.append((x, y - 8 if free else y + 17))
        found.append(_text(*taken[-1], f"{curve.result:.3f}", "end", _colour(names.index(curve.name)), more=halo))
    return found


def _legend(number: int, name: str) -> list[str]:
    """Above the frame."""
    x, y = LEFT + (number % 2) * (WIDTH - LEFT - RIGHT) / 2, TOP + 8 + ROW * (number // 2)
    line = f'<line x1="{x}" y1="{y - 4}" x2="{x + 36}" y2="{y - 4}" {_stroke(number)}/>'
    return [line, _text(x + 44, y, name, "start", "#111")]


def _stroke(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f'stroke="{_colour(number)}" stroke-width="2.2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e2e2e2"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333", size: int = 13, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}" {more}>{escape(text)}</text>'
