"""Plots of image-level predictions: confusion, ROC, precision-recall, reliability, scatter.

Each picture is (height, width, 3) uint8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from medconv.features.image_level import metrics

_MAX_CURVES = 10  # in one picture
_MAX_COUNTED_NAMES = 15  # names up to which a matrix has its counts written in it
_MAX_PANELS = 6  # numbers of a regression
_UNIT_RANGE = (-0.01, 1.01)  # 0 to 1, with a margin for the line width
if TYPE_CHECKING:
    from matplotlib.figure import Figure
_DPI = 100
_PANELS_PER_ROW = 3
_PANEL_INCHES = 4.0
_MAX_LETTERS = 24  # of a name
# A name, the scores of cases (cases,), and which of them are positive (cases,).
Curve = tuple[str, np.ndarray, np.ndarray]


def confusion(names: Sequence[str], table: np.ndarray) -> np.ndarray:
    """True against predicted classes. Shape: table (names, names), numbers of cases."""
    return _count_matrix(
        table, rows=names, columns=names, xlabel="predicted", ylabel="truth", title="cases of each class"
    )


def right_and_wrong(
    names: Sequence[str], predicted: np.ndarray, positive: np.ndarray, known: np.ndarray
) -> np.ndarray:
    """Right and wrong predictions of each label whose truth is known. Shape: (cases, names), bool."""
    masks = {
        "true positive": predicted & positive & known,
        "false negative": ~predicted & positive & known,
        "false positive": predicted & ~positive & known,
        "true negative": ~predicted & ~positive & known,
    }
    table = np.stack([mask.sum(0) for mask in masks.values()], 1)
    title = f"predicted above {metrics.THRESHOLD}"
    return _count_matrix(table, rows=names, columns=tuple(masks), title=title)


def _count_matrix(
    table: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    xlabel: str = "",
    ylabel: str = "",
) -> np.ndarray:
    """A matrix with counts in its cells; the colour is the share of the row."""
    cases_per_row = np.maximum(table.sum(1, keepdims=True), 1)
    figure, axes = _one_panel(_matrix_inches(len(columns)), _matrix_inches(len(rows)))
    axes.imshow(table / cases_per_row, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), map(_plain, columns), rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), map(_plain, rows), fontsize=8)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if max(table.shape) <= _MAX_COUNTED_NAMES:
        _write_counts(axes, table, is_dark=table > 0.6 * cases_per_row)
    return _pixels(figure)


def _write_counts(axes: Any, table: np.ndarray, is_dark: np.ndarray) -> None:
    """White on dark cells, black on others. Shape: both (rows, columns)."""
    for (row, column), count in np.ndenumerate(table):
        axes.text(
            column,
            row,
            str(count),
            ha="center",
            va="center",
            color="w" if is_dark[row, column] else "k",
            fontsize=8,
        )


def roc(curves: Sequence[Curve]) -> np.ndarray:
    """A curve per class (against all others) or label, at most ten."""
    figure, axes = _one_panel()
    _draw_curves(axes, _roc_curve, curves)
    _plot_diagonal(axes, 0, 1)
    axes.set(xlabel="1 - specificity", ylabel="sensitivity", title="ROC")
    return _pixels(figure)


def precision_recall(curves: Sequence[Curve]) -> np.ndarray:
    """A curve per class (against all others) or label, at most ten, with its average precision.

    A dotted line of the same colour is the share of positive cases: the precision of chance.
    """
    figure, axes = _one_panel()
    _draw_curves(axes, _precision_recall_curve, curves)
    axes.set(xlabel="recall (sensitivity)", ylabel="precision", title="Precision and recall")
    return _pixels(figure)


def _draw_curves(
    axes: Any, draw: Callable[[Any, str, np.ndarray, np.ndarray], bool], curves: Sequence[Curve]
) -> None:
    """Curves over all thresholds, and a legend, which also names those that are undefined.

    Args:
        draw: one curve, of a name, its scores (cases,) and which cases are positive; False: it is undefined.
    """
    drawn_curves = curves[:_MAX_CURVES]
    undefined = [
        name for name, scores, is_positive in drawn_curves if not draw(axes, name, scores, is_positive)
    ]
    axes.set(xlim=_UNIT_RANGE, ylim=_UNIT_RANGE)
    _add_legend(axes, len(curves) - _MAX_CURVES, undefined)


def _roc_curve(axes: Any, name: str, scores: np.ndarray, is_positive: np.ndarray) -> bool:
    area = metrics.auc(scores, is_positive)
    if area is None:
        return False
    false_positive_rate, true_positive_rate = roc_points(scores, is_positive)
    label = f" {_plain(name)}, AUC {area:.3f}"
    axes.plot(false_positive_rate, true_positive_rate, label=label)
    return True


def _precision_recall_curve(axes: Any, name: str, scores: np.ndarray, is_positive: np.ndarray) -> bool:
    if not is_positive.any() or not np.isfinite(scores).all():
        return False
    precision, recall = precision_recall_points(scores, is_positive)
    # the area of the steps, as in scikit-learn
    average_precision = float((np.diff(recall, prepend=0) * precision).sum())
    label = f" {_plain(name)}, AP {average_precision:.3f}"
    (line,) = axes.step([0, *recall], [precision[0], *precision], where="pre", label=label)
    axes.axhline(is_positive.mean(), color=line.get_color(), linestyle=":", linewidth=1)
    return True


def reliability(curves: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Reliability diagram: mean probability and share of correct predictions in 15 bins; below, a histogram.

    Args:
        curves: at most ten are drawn: name, probabilities (cases,), and whether each is right (cases,).
    """
    # the diagram is three times as high as the histogram
    figure, (axes, histogram) = _stacked(height_ratios=(3, 1))
    drawn_curves = curves[:_MAX_CURVES]
    for name, probabilities, right in drawn_curves:
        mean, share, counts = metrics.bins(probabilities, right)
        has_cases = counts > 0
        axes.plot(mean[has_cases], share[has_cases], marker="o", markersize=4, label=f" {_plain(name)}")
    all_probabilities = [probabilities for _, probabilities, _ in drawn_curves]
    histogram.hist(all_probabilities, bins=metrics.BINS, range=(0, 1), stacked=True)
    _plot_diagonal(axes, 0, 1)
    axes.set(ylabel="share correct", xlim=_UNIT_RANGE, ylim=_UNIT_RANGE, title="Reliability")
    histogram.set(xlabel="probability", ylabel="cases", xlim=_UNIT_RANGE)
    _add_legend(axes, len(curves) - _MAX_CURVES, [])
    return _pixels(figure)


def scatter(names: Sequence[str], outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Predicted against true values, a panel per name, at most six; a dot is a case."""
    names = names[:_MAX_PANELS]
    figure, panels = _panel_grid(len(names))
    for axes, name, predicted, true in zip(panels, names, outputs.T, truth.T, strict=False):
        is_finite = np.isfinite(predicted) & np.isfinite(true)
        axes.scatter(true[is_finite], predicted[is_finite], s=9, alpha=0.6, linewidths=0)
        if is_finite.any():
            values = np.concatenate([predicted[is_finite], true[is_finite]])
            _plot_diagonal(axes, float(values.min()), float(values.max()))
        axes.set(xlabel="truth", ylabel="predicted", title=_plain(name))
    return _pixels(figure)


def _plot_diagonal(axes: Any, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color="0.7", linestyle=":", linewidth=1)


def _one_panel(width: float = 5.0, height: float = 4.6) -> tuple[Figure, Any]:
    """A figure and its axes. Args: width, height: inches."""
    figure = _figure(width, height)
    return figure, figure.subplots()


def _stacked(height_ratios: Sequence[int]) -> tuple[Figure, Any]:
    """A figure with panels below each other, which share the horizontal axis."""
    figure = _figure(width=5.0, height=4.6)
    return figure, figure.subplots(len(height_ratios), 1, sharex=True, height_ratios=height_ratios)


def _panel_grid(panels: int) -> tuple[Figure, Any]:
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


def _pixels(figure: Figure) -> np.ndarray:
    """A figure as it is drawn. Shape: (height, width, 3), uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box
        warnings.simplefilter("ignore")
        canvas.draw()
    rgba = np.asarray(canvas.buffer_rgba())
    return np.ascontiguousarray(rgba[..., :3])


def _add_legend(axes: Any, hidden_curves: int, undefined: Sequence[str]) -> None:
    """A legend of the curves, with notes below. Args: undefined: names of curves that could not be drawn."""
    notes = []
    if hidden_curves > 0:
        notes.append(f"and {hidden_curves} more")
    if undefined:
        names = ", ".join(map(_plain, undefined[:3]))
        ellipsis = ", …" if len(undefined) > 3 else ""
        notes.append(f"undefined: {names}{ellipsis}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="best")
    axes.text(0.98, 0.02, "\n".join(notes), transform=axes.transAxes, ha="right", fontsize=8)


def _matrix_inches(names: int) -> float:
    """The edge of a matrix with so many rows or columns."""
    return min(2.6 + 0.45 * names, 14.0)


def _plain(name: str) -> str:
    """A name from a file: on one line, shortened, and not parsed as a formula."""
    line = " ".join(str(name).split())
    short = line if len(line) <= _MAX_LETTERS else line[: _MAX_LETTERS - 1] + "…"
    return short.replace("$", r"\$")


def roc_points(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rate at each threshold, from the highest; equal scores share a threshold."""
    false_positives, true_positives = _positives(scores, positive)
    false_positives = np.concatenate([[0], false_positives])
    true_positives = np.concatenate([[0], true_positives])
    return false_positives / false_positives[-1], true_positives / true_positives[-1]


def precision_recall_points(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall at each threshold, from the highest; equal scores share a threshold."""
    false_positives, true_positives = _positives(scores, positive)
    precision = true_positives / (true_positives + false_positives)
    return precision, true_positives / true_positives[-1]


def _positives(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of false and true positives at each distinct score, from the highest."""
    order = np.argsort(-scores, kind="stable")
    # cases of equal scores are on the same side of every threshold
    is_last_of_score = np.append(np.diff(scores[order]) != 0, True)
    ends = np.flatnonzero(is_last_of_score)
    return np.cumsum(~positive[order])[ends], np.cumsum(positive[order])[ends]
