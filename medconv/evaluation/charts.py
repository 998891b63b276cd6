"""Distributions as SVG: a row per class with a box, its whiskers and the cases as dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

_WIDTH, _LEFT, _RIGHT = 860, 190, 20  # in the SVG's own units; names stand in the left margin
_ROW, _BOX, _DOT = 34, 14, 3.2
_ALL_DOTS = 200  # with more cases than this only those beyond the whiskers are drawn


@dataclass(frozen=True)
class Series:
    """One row. Args: values: by case; style: CSS class of its colour."""

    title: str
    values: dict[str, float]
    style: str


def distribution(rows: Sequence[Series], unit: str) -> str:
    """Box: the quartiles, with the median; whiskers: the outermost cases within 1.5 box lengths (Tukey).

    One failure must not squeeze all others into a line: the axis ends one length of what the whiskers span beyond them, and
    what lies farther off is counted at its edge.
    """
    whiskers = [end for row in rows if row.values for end in _summary(row)[::4]]
    if not whiskers:
        return '<p class="note">undefined in every case</p>'
    everything = [value for row in rows for value in row.values.values()]
    span = max(whiskers) - min(whiskers)
    marks = ticks(max(min(everything), min(whiskers) - span), min(max(everything), max(whiskers) + span))
    bottom = _ROW * len(rows) + 8
    parts = [f'<svg viewBox="0 0 {_WIDTH} {bottom + 28}" role="img">']
    for mark in marks:
        x = _place(mark, marks)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}">{mark:.6g}{f" {unit}" if unit else ""}</text>')
    for i, row in enumerate(rows):
        parts += _row(row, (i + 0.5) * _ROW, marks)
    return "\n".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers whose first and last enclose both; always two at least."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= min((1, 2, 5, 10), key=lambda factor: abs((high - low) / (step * factor) - count))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _summary(row: Series) -> tuple[float, float, float, float, float]:
    """Lower whisker, quartile, median, quartile, upper whisker."""
    values = np.array(list(row.values.values()))
    q1, median, q3 = (float(q) for q in np.percentile(values, [25, 50, 75]))
    inside = values[(values >= q1 - 1.5 * (q3 - q1)) & (values <= q3 + 1.5 * (q3 - q1))]
    return float(inside.min()), q1, median, q3, float(inside.max())


def _row(row: Series, y: float, marks: Sequence[float]) -> list[str]:
    label = row.title if len(row.title) <= 26 else row.title[:25] + "…"
    parts = [f'<text class="name" x="{_LEFT - 14}" y="{y + 4:.1f}">{escape(label)}<title>{escape(row.title)}</title></text>']
    if not row.values:
        return parts
    low, q1, median, q3, high = (_place(value, marks) for value in _summary(row))
    parts.append(f'<g class="{row.style}"><line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>')
    parts.append(f'<rect class="box" x="{q1:.1f}" y="{y - _BOX / 2}" width="{max(q3 - q1, 1):.1f}" height="{_BOX}"/>')
    parts += _dots(row, y, marks)
    parts.append(f'<line class="median" x1="{median:.1f}" x2="{median:.1f}" y1="{y - 10}" y2="{y + 10}"/>')
    return [*parts, *_beyond(row, y, marks), "</g>"]


def _dots(row: Series, y: float, marks: Sequence[float]) -> list[str]:
    low, *_, high = _summary(row)
    few = len(row.values) <= _ALL_DOTS
    shown = {case: v for case, v in row.values.items() if (few or not low <= v <= high) and marks[0] <= v <= marks[-1]}
    jitter = {case: ((i * 0.618034) % 1 - 0.5) * (_BOX - 2) for i, case in enumerate(shown)}  # evenly, and always the same
    return [
        f'<circle cx="{_place(v, marks):.1f}" cy="{y + jitter[case]:.1f}" r="{_DOT}">'
        f"<title>{escape(case)}: {v:.4g}</title></circle>"
        for case, v in shown.items()
    ]


def _beyond(row: Series, y: float, marks: Sequence[float]) -> list[str]:
    """How many cases lie off each end of the axis, and how far."""
    parts = []
    for edge, sign, anchor in ((marks[0], -1, "start"), (marks[-1], 1, "end")):
        off = {case: v for case, v in row.values.items() if (v - edge) * sign > 0}
        if off:
            x, farthest = _place(edge, marks), max(off.values(), key=lambda v: v * sign)
            tip = f"{x:.1f},{y} {x - 8 * sign:.1f},{y - 5} {x - 8 * sign:.1f},{y + 5}"
            words = f"{farthest:.4g}" if len(off) == 1 else f"{len(off)} cases, to {farthest:.4g}"
            names = escape(", ".join(f"{case}: {v:.4g}" for case, v in list(off.items())[:20]))
            parts.append(f'<polygon points="{tip}"><title>{names}</title></polygon>')
            parts.append(f'<text x="{x - 13 * sign:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{words}</text>')
    return parts


def _place(value: float, marks: Sequence[float]) -> float:
    return _LEFT + (value - marks[0]) / (marks[-1] - marks[0]) * (_WIDTH - _LEFT - _RIGHT - 20)
