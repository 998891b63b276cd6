"""Box plots of a metric over cases, a row per class, as inline SVG in the colours of the page around it."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any
from xml.etree import ElementTree

import numpy as np

# CSS variable of report.css: the colour that matplotlib draws; `svg` replaces it by the variable, for
# dark mode.
THEME = {"a": "#0072b2", "b": "#d55e00", "ink": "#1b1f24", "soft": "#5b6470", "line": "#d8dde3"}
Tooltips = dict[str, list[str]]  # id of an SVG group to a text for each mark in it


def svg(figure: Any, tooltips: Mapping[str, Sequence[str]]) -> str:
    """The figure as SVG for an HTML page, reproducible.

    Args:
        figure: matplotlib's.
        tooltips: group id to a text for each mark.
    """
    root = ElementTree.fromstring(_plain_svg(figure))
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    for element in list(root.iter()):
        # without XML namespaces, as inside HTML
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if "style" in element.attrib:
            element.attrib["style"] = _with_variables(element.attrib["style"])
    for group in root.findall(".//g[@id]"):
        marks = [element for element in group.iter() if _is_mark(element)]
        texts = tooltips.get(group.attrib.pop("id"), ())
        for mark, tooltip in zip(marks, texts, strict=False):
            ElementTree.SubElement(mark, "title").text = tooltip
    return ElementTree.tostring(root, "unicode")


def _plain_svg(figure: Any) -> str:
    """As matplotlib writes it, without date and random ids."""
    from matplotlib import rc_context

    text = StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "medconv", "font.sans-serif": ["DejaVu Sans"]}
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that matplotlib's font lacks; the browser has them
        figure.savefig(text, format="svg", dpi=72, metadata=metadata)
    return text.getvalue()


def _with_variables(style: str) -> str:
    """A CSS style with the page's variables instead of colours."""
    for name, colour in THEME.items():
        style = style.replace(colour, f"var(--{name})")
    return style


def _is_mark(element: ElementTree.Element) -> bool:
    """Not a definition, which has an id."""
    return element.tag in ("use", "path", "text") and "id" not in element.attrib


# points of 1/72 inch; the foot holds the axis' numbers
_WIDTH = 645
_ROW_HEIGHT = 25
_FOOT_HEIGHT = 20
_FONT_SIZE = 8.5
_THIN_LINE = 0.75
_MAX_DOTS = 200  # with more cases than this, only those beyond the whiskers are drawn
_MAX_TOOLTIP_CASES = 20
_MAX_LETTERS = 24  # of a class name
_GOLDEN_RATIO = 0.618034


@dataclass(frozen=True)
class Series:
    """One row.

    Args:
        title: of the row.
        values: by case.
        style: "a" or "b", its colour.
    """

    title: str
    values: dict[str, float]
    style: str


def distribution(rows: Sequence[Series], unit: str) -> str:
    """SVG; "" if no row has a value. Box: quartiles and median; whiskers: cases within 1.5 box lengths.

    The axis ends one whisker span beyond the whiskers, so that an outlier does not squeeze all other cases
    into a line; cases beyond the axis are counted at its edge.
    """
    from matplotlib.cbook import boxplot_stats  # takes half a second, which commands without charts can save

    boxes = {}
    for y, row in enumerate(rows):
        if row.values:
            boxes[y] = boxplot_stats(list(row.values.values()))[0]
    if not boxes:
        return ""
    all_values = [value for row in rows for value in row.values.values()]
    marks = _ticks(list(boxes.values()), all_values)
    axes = _axes(len(rows), marks, unit)
    tooltips = _label_rows(axes, rows)
    bottom, top = axes.get_ylim()
    axes.vlines(marks, top, bottom, color=THEME["line"], linewidth=_THIN_LINE)
    for y, box in boxes.items():
        tooltips |= _draw_row(axes, y, rows[y], box)
    for artist in axes.get_children():
        artist.set_clip_on(False)
    return svg(axes.figure, tooltips)


def _axes(rows: int, marks: np.ndarray, unit: str) -> Any:
    """Empty axes with a number at each mark."""
    from matplotlib.figure import Figure

    height = _ROW_HEIGHT * rows + _FOOT_HEIGHT
    figure = Figure((_WIDTH / 72, height / 72), facecolor="none")
    foot = _FOOT_HEIGHT / height
    # left, bottom, width and height as shares of the figure
    axes = figure.add_axes((0.22, foot, 0.73, 1 - foot), facecolor="none", frame_on=False)
    first_row_on_top = (rows - 0.5, -0.5)
    axes.set(xlim=(marks[0], marks[-1]), ylim=first_row_on_top)
    axes.tick_params(left=False, bottom=False, labelsize=_FONT_SIZE)
    axes.set_xticks(marks, [f"{mark:.6g} {unit}".strip() for mark in marks], color=THEME["soft"])
    return axes


def _label_rows(axes: Any, rows: Sequence[Series]) -> Tooltips:
    """Write shortened titles, whose tooltips are the full ones."""
    ticks = axes.set_yticks(
        range(len(rows)), [_short(row.title) for row in rows], parse_math=False, color=THEME["ink"]
    )
    for y, tick in enumerate(ticks):
        tick.label1.set_gid(f"name{y}")
    return {f"name{y}": [row.title] for y, row in enumerate(rows)}


def _ticks(boxes: Sequence[Mapping[str, Any]], values: Sequence[float]) -> np.ndarray:
    """About six round numbers from the lower to the upper end of the axis."""
    from matplotlib.ticker import MaxNLocator

    lowest_whisker = min(box["whislo"] for box in boxes)
    highest_whisker = max(box["whishi"] for box in boxes)
    low = max(min(values), 2 * lowest_whisker - highest_whisker)
    high = min(max(values), 2 * highest_whisker - lowest_whisker)
    are_shares = min(values) >= 0 and max(values) <= 1  # such as Dice, of which none is more than 1
    if high - low < 1e-9 * max(1.0, abs(high)):  # all values alike
        low = 0 if are_shares else low - 0.5
        high = 1 if are_shares else high + 0.5
    locator = MaxNLocator(6, steps=[1, 2, 5, 10])
    marks = np.asarray(locator.tick_values(low, high)).round(12) + 0.0  # + 0.0: no -0
    if are_shares:
        marks = marks[(marks >= 0) & (marks <= 1)]
    return marks


def _draw_row(axes: Any, y: int, row: Series, box: Mapping[str, Any]) -> Tooltips:
    """The box, a dot for each case, and at the edges the number of cases beyond the axis."""
    colour = THEME[row.style]
    left, right = axes.get_xlim()
    _draw_box(axes, y, box, colour)
    in_range = {case: value for case, value in row.values.items() if left <= value <= right}
    if len(row.values) > _MAX_DOTS:
        in_range = _beyond_whiskers(in_range, box)
    tooltips = _draw_dots(axes, y, in_range, colour)
    below = {case: value for case, value in row.values.items() if value < left}
    above = {case: value for case, value in row.values.items() if value > right}
    if below:
        tooltips |= _draw_edge(axes, y, below, _Edge(left, "<", "left", 9, min(below.values())), colour)
    if above:
        tooltips |= _draw_edge(axes, y, above, _Edge(right, ">", "right", -9, max(above.values())), colour)
    return tooltips


def _draw_box(axes: Any, y: int, box: Mapping[str, Any], colour: str) -> None:
    """Whiskers, quartiles and median."""
    axes.hlines(y, box["whislo"], box["whishi"], color=colour, linewidth=_THIN_LINE)
    axes.barh(
        y,
        width=box["q3"] - box["q1"],
        height=0.42,
        left=box["q1"],
        color=(colour, 0.16),
        edgecolor=colour,
        linewidth=_THIN_LINE,
    )
    axes.vlines(box["med"], y - 0.3, y + 0.3, color=colour, linewidth=2.25)


def _beyond_whiskers(values: Mapping[str, float], box: Mapping[str, Any]) -> dict[str, float]:
    low = box["whislo"]
    high = box["whishi"]
    return {case: value for case, value in values.items() if not low <= value <= high}


def _draw_dots(axes: Any, y: int, values: Mapping[str, float], colour: str) -> Tooltips:
    # Evenly spread, without random numbers.
    positions = [y + 0.35 * ((index * _GOLDEN_RATIO) % 1 - 0.5) for index in range(len(values))]
    axes.scatter(
        list(values.values()), positions, s=22, alpha=0.55, gid=f"dots{y}", color=colour, linewidths=0
    )
    return {f"dots{y}": [f"{case}: {value:.4g}" for case, value in values.items()]}


@dataclass(frozen=True)
class _Edge:
    """An end of the axis, beyond which cases lie.

    Args:
        x: where it is.
        marker: matplotlib's triangle.
        align: "left" or "right".
        text_offset: of the text to the triangle, in points.
        farthest: the value that lies farthest beyond it.
    """

    x: float
    marker: str
    align: str
    text_offset: int
    farthest: float


def _draw_edge(axes: Any, y: int, beyond: Mapping[str, float], edge: _Edge, colour: str) -> Tooltips:
    """A triangle, and the number of cases beyond the edge."""
    gid = f"beyond{y}{edge.align}"
    axes.scatter([edge.x], [y], s=30, marker=edge.marker, gid=gid, color=colour)
    text = f"{edge.farthest:.4g}"
    if len(beyond) > 1:
        text = f"{len(beyond)} cases, to {text}"
    axes.annotate(
        text,
        (edge.x, y),
        xytext=(edge.text_offset, 0),
        textcoords="offset points",
        ha=edge.align,
        va="center",
        fontsize=_FONT_SIZE,
        color=THEME["soft"],
    )
    cases = [f"{case}: {value:.4g}" for case, value in beyond.items()]
    return {gid: [", ".join(cases[:_MAX_TOOLTIP_CASES])]}


def _short(name: str) -> str:
    """On one line, shortened in the middle to keep its end (A or B), without characters that XML forbids."""
    line = "".join(letter if letter.isprintable() else " " for letter in name)
    if len(line) <= _MAX_LETTERS:
        return line
    return line[: _MAX_LETTERS - 3] + "…" + line[-2:]
