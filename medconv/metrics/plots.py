"""Plots of image-level predictions: confusion, ROC, precision-recall, reliability, scatter.

Each picture is (height, width, 3) uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from medconv.metrics import figures, image_level, threshold_curves, weighted

_MAX_CURVES = 10  # in one picture
_MAX_COUNTED_NAMES = 15  # names up to which a matrix has its counts written in it
_MAX_PANELS = 6  # numbers of a regression
_UNIT_RANGE = (-0.01, 1.01)  # 0 to 1, with a margin for the line width


def confusion(names: Sequence[str], table: np.ndarray) -> np.ndarray:
    """True against predicted classes. Shape: table (names, names), numbers of cases."""
    return _count_matrix(
        table, rows=names, columns=names, xlabel="predicted", ylabel="truth", title="cases of each class"
    )


def right_and_wrong(names: Sequence[str], predicted: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Right and wrong predictions of each label. Shape: (cases, names), bool."""
    masks = {
        "true positive": predicted & positive,
        "false negative": ~predicted & positive,
        "false positive": predicted & ~positive,
        "true negative": ~predicted & ~positive,
    }
    table = np.stack([mask.sum(0) for mask in masks.values()], 1)
    title = f"predicted above {weighted.THRESHOLD}"
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
    figure, axes = figures.one_panel(figures.matrix_inches(len(columns)), figures.matrix_inches(len(rows)))
    axes.imshow(table / cases_per_row, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), map(figures.text, columns), rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), map(figures.text, rows), fontsize=8)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if max(table.shape) <= _MAX_COUNTED_NAMES:
        _write_counts(axes, table, is_dark=table > 0.6 * cases_per_row)
    return figures.pixels(figure)


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


def roc(names: Sequence[str], outputs: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """A curve per class (against all others) or label, at most ten. Shape: (cases, names)."""
    figure, axes = figures.one_panel()
    _draw_curves(axes, _roc_curve, names, outputs, positive)
    _plot_diagonal(axes, 0, 1)
    axes.set(xlabel="1 - specificity", ylabel="sensitivity", title="ROC")
    return figures.pixels(figure)


def precision_recall(names: Sequence[str], outputs: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """A curve per class (against all others) or label, at most ten, with its average precision.

    A dotted line of the same colour is the share of positive cases: the precision of chance.
    Shape: (cases, names).
    """
    figure, axes = figures.one_panel()
    _draw_curves(axes, _precision_recall_curve, names, outputs, positive)
    axes.set(xlabel="recall (sensitivity)", ylabel="precision", title="Precision and recall")
    return figures.pixels(figure)


def _draw_curves(
    axes: Any,
    draw: Callable[[Any, str, np.ndarray, np.ndarray], bool],
    names: Sequence[str],
    outputs: np.ndarray,
    positive: np.ndarray,
) -> None:
    """Curves over all thresholds, and a legend, which also names those that are undefined.

    Args:
        draw: one curve, of a name, its scores (cases,) and which cases are positive; False: it is undefined.
    """
    curves = list(zip(names, outputs.T, positive.T, strict=True))
    drawn_curves = curves[:_MAX_CURVES]
    undefined = [
        name for name, scores, is_positive in drawn_curves if not draw(axes, name, scores, is_positive)
    ]
    axes.set(xlim=_UNIT_RANGE, ylim=_UNIT_RANGE)
    figures.add_legend(axes, len(curves) - _MAX_CURVES, undefined)


def _roc_curve(axes: Any, name: str, scores: np.ndarray, is_positive: np.ndarray) -> bool:
    area = image_level.auc(scores, is_positive)
    if area is None:
        return False
    false_positive_rate, true_positive_rate = threshold_curves.roc(scores, is_positive)
    label = f" {figures.text(name)}, AUC {area:.3f}"
    axes.plot(false_positive_rate, true_positive_rate, label=label)
    return True


def _precision_recall_curve(axes: Any, name: str, scores: np.ndarray, is_positive: np.ndarray) -> bool:
    if not is_positive.any() or not np.isfinite(scores).all():
        return False
    precision, recall = threshold_curves.precision_recall(scores, is_positive)
    # the area of the steps, as in scikit-learn
    average_precision = float((np.diff(recall, prepend=0) * precision).sum())
    label = f" {figures.text(name)}, AP {average_precision:.3f}"
    (line,) = axes.step([0, *recall], [precision[0], *precision], where="pre", label=label)
    axes.axhline(is_positive.mean(), color=line.get_color(), linestyle=":", linewidth=1)
    return True


def reliability(curves: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Reliability diagram: mean probability and share of correct predictions in 15 bins; below, a histogram.

    Args:
        curves: at most ten are drawn: name, probabilities (cases,), and whether each is right (cases,).
    """
    # the diagram is three times as high as the histogram
    figure, (axes, histogram) = figures.stacked(height_ratios=(3, 1))
    drawn_curves = curves[:_MAX_CURVES]
    for name, probabilities, right in drawn_curves:
        mean, share, counts = image_level.bins(probabilities, right)
        has_cases = counts > 0
        axes.plot(mean[has_cases], share[has_cases], marker="o", markersize=4, label=f" {figures.text(name)}")
    all_probabilities = [probabilities for _, probabilities, _ in drawn_curves]
    histogram.hist(all_probabilities, bins=weighted.BINS, range=(0, 1), stacked=True)
    _plot_diagonal(axes, 0, 1)
    axes.set(ylabel="share correct", xlim=_UNIT_RANGE, ylim=_UNIT_RANGE, title="Reliability")
    histogram.set(xlabel="probability", ylabel="cases", xlim=_UNIT_RANGE)
    figures.add_legend(axes, len(curves) - _MAX_CURVES, [])
    return figures.pixels(figure)


def scatter(
    names: Sequence[str],
    outputs: np.ndarray,
    truth: np.ndarray,
    lines: Sequence[tuple[float, float] | None] = (),
) -> np.ndarray:
    """Predicted against true values, a panel per name, at most six; a dot is a case.

    Args:
        lines: for each name slope and intercept of the true values over the predicted ones.
    """
    names = names[:_MAX_PANELS]
    figure, panels = figures.panel_grid(len(names))
    # a name without a line has None
    lines = [*lines, *[None] * len(names)]
    for axes, name, predicted, true, line in zip(panels, names, outputs.T, truth.T, lines, strict=False):
        is_finite = np.isfinite(predicted) & np.isfinite(true)
        _scatter_panel(axes, predicted[is_finite], true[is_finite], line)
        axes.set(xlabel="truth", ylabel="predicted", title=figures.text(name))
    return figures.pixels(figure)


def _scatter_panel(
    axes: Any, predicted: np.ndarray, true: np.ndarray, line: tuple[float, float] | None
) -> None:
    axes.scatter(true, predicted, s=9, alpha=0.6, linewidths=0)
    if not len(predicted):
        return
    values = np.concatenate([predicted, true])
    _plot_diagonal(axes, float(values.min()), float(values.max()))
    if line is not None:
        # a line over predicted values, which are on the vertical axis
        slope, intercept = line
        ends = [float(predicted.min()), float(predicted.max())]
        axes.plot([slope * end + intercept for end in ends], ends, color="C1", linewidth=1)


def _plot_diagonal(axes: Any, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color="0.7", linestyle=":", linewidth=1)
