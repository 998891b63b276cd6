"""Predicted against true Dice: whether the agreement that `predict --quality` wrote can be trusted."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from medconv.data.datasets.common import read_json
from medconv.evaluation.results import plain_number
from medconv.evaluation.segmentation_results import CaseRow
from medconv.features.quality import quality
from medconv.metrics.dice import ClassScores

KEY = "quality"  # in the result of `medconv evaluate`
_MAX_PANELS = 6  # of the chart, a class in each
_MIN_CASES = 3  # of a rank correlation, and of a calibration


def measure(predictions: Path, cases: Sequence[CaseRow], names: Sequence[str]) -> dict[str, Any] | None:
    """Predicted against true Dice; None: the networks did not predict theirs.

    Args:
        predictions: the folder of the label maps.
        cases: measured.
        names: of the classes.
    """
    true_dice = {row["case"]: row["dice"] for row in cases}
    predicted_dice = read(predictions, names, list(true_dice))
    if not predicted_dice:
        return None
    return {
        "method": method(predictions, list(predicted_dice)),
        "per_class": compared(predicted_dice, true_dice, names),
        "cases": predicted_dice,
    }


def lines(measured: Mapping[str, Any]) -> list[str]:
    """For the terminal, a line per class."""
    texts = []
    for name, row in measured["per_class"].items():
        error = row["mae_calibrated"]
        calibration = "not calibrated: too few cases"
        if row["calibration"] is not None:
            calibration = "calibrated, by too few cases to say how far it is off"
        if error is not None:
            calibration = f"calibrated, off by {error:.4f}"
        texts.append(
            f"{name}: predicted minus true Dice {plain_number(row['difference'])}, Spearman "
            f"{plain_number(row['spearman'])} in {row['n']} cases; {calibration}"
        )
    return texts


def figure(result: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Title, chart and note, for the report."""
    true = {row["case"]: row["dice"] for row in result["cases"]}
    png = chart(result[KEY]["cases"], true, list(result["per_class"]))
    predicted = "the mean Dice between the networks of the ensemble"
    if result[KEY]["method"] == quality.SOFT:
        predicted = "the soft Dice of the network's probabilities and its answer"
    note = f"predicted: {predicted}; a dot is a case"
    return "Predicted against true Dice", png, note


def read(predictions: Path, names: Sequence[str], cases: Sequence[str]) -> dict[str, ClassScores]:
    """Case to the predicted Dice of each class; the cases that have one.

    Raises:
        ValueError: a file that `predict --quality` did not write for these classes.
    """
    folder = predictions / quality.FOLDER
    paths = {case: folder / f"{case}.json" for case in cases}
    return {case: _read_case(path, names) for case, path in paths.items() if path.is_file()}


def method(predictions: Path, cases: Sequence[str]) -> str:
    """What the predicted Dice is, `quality.PAIRWISE` or `quality.SOFT`.

    Args:
        cases: those that `read` returned.
    Raises:
        ValueError: cases of both.
    """
    folder = predictions / quality.FOLDER
    methods = {read_json(folder / f"{case}.json").get("method", quality.PAIRWISE) for case in cases}
    if len(methods) > 1:
        raise ValueError(
            f"{folder}: some cases have {', the others '.join(sorted(methods))}; predict them anew"
        )
    return str(methods.pop())


def _read_case(path: Path, names: Sequence[str]) -> ClassScores:
    try:
        classes = read_json(path)["classes"]
        scores = {name: classes[name]["dice"] for name in names}
        if not all(value is None or 0 <= value <= 1 for value in scores.values()):
            raise ValueError("Dice outside of 0 to 1")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the quality of a case as medconv predict --quality writes it, with a Dice for "
            f"{', '.join(names)} ({type(error).__name__}: {error})"
        ) from error
    return scores


def compared(
    predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], names: Sequence[str]
) -> dict[str, Any]:
    """Agreement of predicted with true Dice, by class.

    Args:
        predicted: case to Dice of each class.
        true: the same of the measured Dice.
        names: of the classes.
    Returns:
        Class to `n` cases in which both Dice are defined, their rank correlation `spearman`, `difference`:
        predicted minus true, the mean, and `mae`: the mean without its sign; `calibration`: slope and
        intercept of the line from predicted to true Dice, for `predict --calibration`, and `mae_calibrated`:
        its mean error on cases that were left out, one by one, when it was fitted. None: undefined.
    """
    rows = {}
    for name in names:
        predicted_dice, true_dice = _defined_pairs(predicted, true, name)
        rows[name] = _agreement(predicted_dice, true_dice)
    return rows


def chart(
    predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], names: Sequence[str]
) -> bytes:
    """PNG: predicted against true Dice, a panel per class, at most six; a dot is a case, the line the
    calibration.
    """
    return chart_of_classes(names, "predicted", lambda axes, name: _draw(axes, predicted, true, name))


def chart_of_classes(
    names: Sequence[str], label: str, draw: Callable[[Any, str], tuple[Sequence[float], Sequence[float]]]
) -> bytes:
    """PNG: something against true Dice, a panel per class, at most six, and a dotted line where both agree.

    Args:
        label: of the vertical axis.
        draw: draws the cases of a class, and gives their true Dice and what it is compared with.
    """
    from matplotlib.figure import Figure  # takes half a second: only these charts need it

    names = names[:_MAX_PANELS]
    columns, rows = min(3, len(names)), ceil(len(names) / 3)
    figure = Figure(figsize=(4 * columns, 4 * rows), dpi=100, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(panels, names, strict=False):
        true_dice, compared_with = draw(axes, name)
        ends = [*compared_with, *true_dice] or [0.0, 1.0]
        diagonal = [min(ends), max(ends)]
        axes.plot(
            diagonal, diagonal, color="0.7", linestyle=":", linewidth=1, zorder=1.9
        )  # below other lines
        # not parsed as a formula
        axes.set(xlabel="truth", ylabel=label, title=f"{name:.24}".replace("$", r"\$"))
    content = BytesIO()
    with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box
        warnings.simplefilter("ignore")
        figure.savefig(content, format="png")
    return content.getvalue()


def _draw(
    axes: Any, predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], name: str
) -> tuple[Sequence[float], Sequence[float]]:
    predicted_dice, true_dice = _defined_pairs(predicted, true, name)
    axes.scatter(true_dice, predicted_dice, s=9, alpha=0.6, linewidths=0)
    line = _fitted(predicted_dice, true_dice)
    if line is not None:
        # over predicted values, which are on the vertical axis
        slope, intercept = line
        low, high = float(predicted_dice.min()), float(predicted_dice.max())
        axes.plot([slope * low + intercept, slope * high + intercept], [low, high], color="C1", linewidth=1)
    return true_dice.tolist(), predicted_dice.tolist()


def _defined_pairs(
    predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true Dice of a class, of the cases in which both are defined."""
    pairs = [(predicted[case][name], true[case][name]) for case in predicted]
    # a class is undefined where neither label map has it
    defined = [pair for pair in pairs if None not in pair]
    values = np.array(defined, float).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def _agreement(predicted: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    if not len(true):
        undefined = ("spearman", "difference", "mae", "calibration", "mae_calibrated")
        return {"n": 0, **dict.fromkeys(undefined)}
    difference = predicted - true
    line = _fitted(predicted, true)
    return {
        "n": len(true),
        "spearman": _rank_correlation(predicted, true),
        "difference": float(difference.mean()),
        "mae": float(np.abs(difference).mean()),
        "calibration": list(line) if line else None,
        "mae_calibrated": _leave_one_out_error(predicted, true),
    }


def _rank_correlation(predicted: np.ndarray, true: np.ndarray) -> float | None:
    """None: too few cases, or constant values."""
    if len(true) < _MIN_CASES:
        return None
    with warnings.catch_warnings():  # of constant values, whose correlation is undefined
        warnings.simplefilter("ignore")
        correlation = float(spearmanr(predicted, true).statistic)
    return correlation if np.isfinite(correlation) else None


def _fitted(predicted: np.ndarray, true: np.ndarray) -> quality.Line | None:
    """Slope and intercept by least squares; None: too few cases.

    Never falling: where predicted Dice says nothing about true Dice, the line is the mean.
    """
    if len(true) < _MIN_CASES:
        return None
    centred = predicted - predicted.mean()
    covariance = max(0.0, float(centred @ true))
    variance = max(float(centred @ centred), 1e-12)  # constant predictions: the slope is 0
    slope = covariance / variance
    intercept = float(true.mean() - slope * predicted.mean())
    return slope, intercept


def _leave_one_out_error(predicted: np.ndarray, true: np.ndarray) -> float | None:
    """The mean error of a case under the line that was fitted without it; None: too few cases."""
    expected_dice = []
    for index, dice in enumerate(predicted.tolist()):
        # the line of all other cases
        is_kept = np.arange(len(true)) != index
        line = _fitted(predicted[is_kept], true[is_kept])
        expected_dice.append(quality.expected(dice, line))
    if None in expected_dice:
        return None
    return float(np.abs(np.array(expected_dice, float) - true).mean())
