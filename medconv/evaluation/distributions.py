"""Box plots of a metric over cases, a row per class, as inline SVG in the colours of the page around it."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any
from xml.etree import ElementTree

import numpy as np

# CSS variable of report.css: the colour that matplotlib draws; `_svg` replaces it by the variable, for
# dark mode.
_THEME = {"a": "#0072b2", "b": "#d55e00", "ink": "#1b1f24", "soft": "#5b6470", "line": "#d8dde3"}
_WIDTH, _ROW, _FOOT = 645, 25, 20  # points; the foot holds the axis' numbers
_ALL_DOTS = 200  # with more cases than this, only those beyond the whiskers are drawn
_MAX_LETTERS = 24  # of a class name


@dataclass(frozen=True)
class Series:
    """One row. Args: values: by case; style: "a" or "b", its colour."""

    title: str
    values: dict[str, float]
    style: str


def distribution(rows: Sequence[Series], unit: str) -> str:
    """SVG; "" if no row has a value. Box: quartiles and median; whiskers: cases within 1.5 box lengths.

    The axis ends one whisker span beyond the whiskers, so that an outlier does not squeeze all other cases
    into a line; cases beyond the axis are counted at its edge.
    """
    from matplotlib.cbook import boxplot_stats  # takes half a second, which commands without charts can save
    from matplotlib.figure import Figure

    boxes = {y: boxplot_stats(list(row.values.values()))[0] for y, row in enumerate(rows) if row.values}
    if not boxes:
        return ""
    marks = _ticks(boxes.values(), [value for row in rows for value in row.values.values()])
    height = _ROW * len(rows) + _FOOT
    axes = Figure((_WIDTH / 72, height / 72), facecolor="none").add_axes(
        (0.22, _FOOT / height, 0.73, 1 - _FOOT / height), facecolor="none", frame_on=False
    )
    axes.set(xlim=(marks[0], marks[-1]), ylim=(len(rows) - 0.5, -0.5))
    axes.tick_params(left=False, bottom=False, labelsize=8.5)
    axes.set_xticks(marks, [f"{mark:.6g} {unit}".strip() for mark in marks], color=_THEME["soft"])
    names = [_short(row.title) for row in rows]
    labels = axes.set_yticks(range(len(rows)), names, parse_math=False, color=_THEME["ink"])
    axes.vlines(marks, -0.5, len(rows) - 0.5, color=_THEME["line"], linewidth=0.75)
    tooltips = {f"name{y}": [row.title] for y, row in enumerate(rows)}
    for y, label in enumerate(labels):
        label.label1.set_gid(f"name{y}")
    for y, box in boxes.items():
        _draw(axes, y, rows[y], box, tooltips)
    for artist in axes.get_children():
        artist.set_clip_on(False)
    return _svg(axes.figure, tooltips)


def _ticks(boxes: Any, values: Sequence[float]) -> np.ndarray:
    """About six round numbers from the lower to the upper end of the axis."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(box["whislo"] for box in boxes), max(box["whishi"] for box in boxes)
    low, high = max(min(values), 2 * low - high), min(max(values), 2 * high - low)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    marks = np.asarray(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)).round(12) + 0.0  # no -0
    shares = min(values) >= 0 and max(values) <= 1  # such as Dice, of which none is more than 1
    return marks[(marks >= 0) & (marks <= 1)] if shares else marks


def _draw(axes: Any, y: int, row: Series, box: Mapping[str, Any], tooltips: dict[str, list[str]]) -> None:
    colour, (left, right) = _THEME[row.style], axes.get_xlim()
    width = box["q3"] - box["q1"]
    axes.hlines(y, box["whislo"], box["whishi"], color=colour, linewidth=0.75)
    axes.barh(y, width, 0.42, box["q1"], color=(colour, 0.16), edgecolor=colour, linewidth=0.75)
    axes.vlines(box["med"], y - 0.3, y + 0.3, color=colour, linewidth=2.25)
    inner = () if len(row.values) <= _ALL_DOTS else (box["whislo"], box["whishi"])
    shown = {case: value for case, value in row.values.items() if left <= value <= right}
    dots = {case: value for case, value in shown.items() if not (inner and inner[0] <= value <= inner[1])}
    # Evenly spread, without random numbers.
    jitter = [y + 0.35 * ((i * 0.618034) % 1 - 0.5) for i in range(len(dots))]
    axes.scatter(list(dots.values()), jitter, s=22, alpha=0.55, gid=f"dots{y}", color=colour, linewidths=0)
    tooltips[f"dots{y}"] = [f"{case}: {value:.4g}" for case, value in dots.items()]
    for edge, sign, marker, align in ((left, -1, "<", "left"), (right, 1, ">", "right")):
        beyond = {case: value for case, value in row.values.items() if (value - edge) * sign > 0}
        if beyond:
            farthest = max(beyond.values(), key=lambda value: value * sign)
            words = f"{farthest:.4g}" if len(beyond) == 1 else f"{len(beyond)} cases, to {farthest:.4g}"
            axes.scatter([edge], [y], s=30, marker=marker, gid=f"beyond{y}{align}", color=colour)
            tooltips[f"beyond{y}{align}"] = [", ".join(f"{c}: {v:.4g}" for c, v in list(beyond.items())[:20])]
            at = {"xytext": (-9 * sign, 0), "textcoords": "offset points", "ha": align, "va": "center"}
            axes.annotate(words, (edge, y), fontsize=8.5, color=_THEME["soft"], **at)


def _svg(figure: Any, tooltips: Mapping[str, Sequence[str]]) -> str:
    """The figure as SVG for an HTML page, reproducible. Args: tooltips: group id to a text for each mark."""
    from matplotlib import rc_context

    text = StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.sans-serif": ["DejaVu Sans"]}
    with rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that matplotlib's font lacks; the browser has them
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", dpi=72, metadata=metadata)
    root = ElementTree.fromstring(text.getvalue())
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    for element in list(root.iter()):
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        for name, colour in _THEME.items() if "style" in element.attrib else ():
            element.attrib["style"] = element.attrib["style"].replace(colour, f"var(--{name})")
    for group in root.findall(".//g[@id]"):
        marks = [m for m in group.iter() if m.tag in ("use", "path", "text") and "id" not in m.attrib]
        for mark, tooltip in zip(marks, tooltips.get(group.attrib.pop("id"), ()), strict=False):
            ElementTree.SubElement(mark, "title").text = tooltip
    return ElementTree.tostring(root, "unicode")


def _short(name: str) -> str:
    """On one line, shortened in the middle to keep its end (A or B), without characters that XML forbids."""
    line = "".join(letter if letter.isprintable() else " " for letter in name)
    return line if len(line) <= _MAX_LETTERS else line[: _MAX_LETTERS - 3] + "…" + line[-2:]
