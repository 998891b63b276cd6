"""Plots of image-level predictions: confusion matrix, ROC, reliability, scatter plots of regressions.

Only matplotlib's objects, not its global state, so that any thread may draw. Each picture is (height, width,
3) uint8. Names come from files, so no text is parsed as a formula.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from medconv.metrics import image_level

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 100
_CURVES = 10  # in one picture
_COUNTED = 15  # names up to which a matrix has its counts written in it
_PANELS = 6  # numbers shown
_LETTERS = 24  # of a name


def confusion(names: Sequence[str], table: np.ndarray) -> np.ndarray:
    """True against predicted classes. Shape: table (names, names), numbers of cases."""
    return _counts(names, table, names, "predicted", "truth", "cases of each class")


def right_and_wrong(names: Sequence[str], predicted: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Right and wrong predictions of each label. Shape: (cases, names), bool."""
    parts = (predicted & positive, ~predicted & positive, predicted & ~positive, ~predicted & ~positive)
    columns = ("true positive", "false negative", "false positive", "true negative")
    table = np.stack([part.sum(0) for part in parts], 1)
    return _counts(names, table, columns, "", "", f"predicted above {image_level.THRESHOLD}")


def _counts(
    names: Sequence[str], table: np.ndarray, columns: Sequence[str], across: str, down: str, title: str
) -> np.ndarray:
    """A matrix with counts in its cells; the colour is the share of the row."""
    cases = np.maximum(table.sum(1, keepdims=True), 1)
    figure, axes = _figure(_size(len(columns)), _size(len(names)))
    axes.imshow(table / cases, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), map(_text, columns), rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), map(_text, names), fontsize=8)
    axes.set(xlabel=across, ylabel=down, title=title)
    if max(table.shape) <= _COUNTED:
        dark = table > 0.6 * cases
        for (row, column), count in np.ndenumerate(table):
            color = "w" if dark[row, column] else "k"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
    return _pixels(figure)


def roc(names: Sequence[str], outputs: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """A curve per class (against the rest) or label, at most ten. Shape: (cases, names)."""
    figure, axes = _figure()
    curves = list(zip(names, outputs.T, positive.T, strict=True))
    undefined = []
    for name, score, member in curves[:_CURVES]:
        area = image_level.auc(score, member)
        if area is None:
            undefined.append(name)
        else:
            axes.plot(*_steps(score, member), label=f" {_text(name)}, AUC {area:.3f}")
    axes.plot([0, 1], [0, 1], color="0.7", linestyle=":", linewidth=1)
    axes.set(
        xlabel="1 - specificity", ylabel="sensitivity", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), title="ROC"
    )
    _legend(axes, len(curves) - _CURVES, undefined)
    return _pixels(figure)


def reliability(curves: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Reliability diagram: mean probability and share of correct predictions in 15 bins; below, a histogram.

    Args: curves: at most ten are drawn: name, probabilities (cases,), and whether each is right (cases,).
    """
    figure, (axes, below) = _figure(rows=(3, 1))
    for name, probability, right in curves[:_CURVES]:
        mean, share, counts = image_level.bins(probability, right)
        axes.plot(mean[counts > 0], share[counts > 0], marker="o", markersize=4, label=f" {_text(name)}")
    below.hist([curve[1] for curve in curves[:_CURVES]], bins=image_level.BINS, range=(0, 1), stacked=True)
    axes.plot([0, 1], [0, 1], color="0.7", linestyle=":", linewidth=1)
    axes.set(ylabel="share correct", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), title="Reliability")
    below.set(xlabel="probability", ylabel="cases", xlim=(-0.01, 1.01))
    _legend(axes, len(curves) - _CURVES, [])
    return _pixels(figure)


def scatter(
    names: Sequence[str],
    outputs: np.ndarray,
    truth: np.ndarray,
    lines: Sequence[tuple[float, float] | None] = (),
) -> np.ndarray:
    """Predicted against true values, a panel per name, at most six; a dot is a case.

    Args: lines: for each name slope and intercept of the true values over the predicted ones.
    """
    names = names[:_PANELS]
    figure, panels = _figure(4.0 * min(3, len(names)), 4.0 * (1 + (len(names) - 1) // 3), columns=len(names))
    lines = [*lines, *[None] * len(names)]
    for axes, name, predicted, reference, line in zip(panels, names, outputs.T, truth.T, lines, strict=False):
        finite = np.isfinite(predicted) & np.isfinite(reference)
        axes.scatter(reference[finite], predicted[finite], s=9, alpha=0.6, linewidths=0)
        if finite.any():
            low, high = (
                float(end(np.concatenate([predicted[finite], reference[finite]]))) for end in (np.min, np.max)
            )
            axes.plot([low, high], [low, high], color="0.7", linestyle=":", linewidth=1)
            if line is not None:
                ends = [float(end(predicted[finite])) for end in (np.min, np.max)]
                axes.plot([line[0] * end + line[1] for end in ends], ends, color="C1", linewidth=1)
        axes.set(xlabel="truth", ylabel="predicted", title=_text(name))
    return _pixels(figure)


def _steps(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rate at each threshold, from the highest; equal scores share a threshold."""
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    true, false = (np.concatenate([[0], np.cumsum(mask[order])[ends]]) for mask in (positive, ~positive))
    return false / false[-1], true / true[-1]


def _figure(
    width: float = 5.0, height: float = 4.6, rows: Sequence[int] = (), columns: int = 0
) -> tuple[Figure, Any]:
    """A figure with one panel, with `rows` (height ratios) below each other, or with `columns`, three a row.

    Args: width, height: inches.
    """
    from matplotlib.figure import Figure  # takes half a second: only commands with plots import it

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    if rows:
        return figure, figure.subplots(len(rows), 1, sharex=True, height_ratios=rows)
    if columns:
        grid = figure.subplots(1 + (columns - 1) // 3, min(3, columns), squeeze=False).ravel()
        for axes in grid[columns:]:
            axes.set_axis_off()
        return figure, grid[:columns]
    return figure, figure.subplots()


def _pixels(figure: Figure) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box
        warnings.simplefilter("ignore")
        canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _legend(axes: Any, more: int, undefined: Sequence[str]) -> None:
    lines = [f"and {more} more"] if more > 0 else []
    if undefined:
        lines.append(f"undefined: {', '.join(map(_text, undefined[:3]))}" + ", …" * (len(undefined) > 3))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="best")
    axes.text(0.98, 0.02, "\n".join(lines), transform=axes.transAxes, ha="right", fontsize=8)


def _size(names: int) -> float:
    return min(2.6 + 0.45 * names, 14.0)


def _text(name: str) -> str:
    """A name from a file: on one line, shortened, and not parsed as a formula."""
    line = " ".join(str(name).split())
    short = line if len(line) <= _LETTERS else line[: _LETTERS - 1] + "…"
    return short.replace("$", r"\$")
