"""Predicted against true Dice: whether the agreement that `predict --quality` wrote can be trusted."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from medconv.data.datasets.common import read_json
from medconv.inference import quality
from medconv.metrics import plots, visualization
from medconv.metrics.dice import ClassScores

_FEWEST = 3  # cases of a rank correlation


def read(predictions: Path, names: Sequence[str], cases: Sequence[str]) -> dict[str, ClassScores]:
    """Case to the predicted Dice of each class; the cases that have one.

    Raises: ValueError: a file that `predict --quality` did not write for these classes.
    """
    paths = {case: predictions / quality.FOLDER / f"{case}.json" for case in cases}
    return {case: _of_case(path, names) for case, path in paths.items() if path.is_file()}


def _of_case(path: Path, names: Sequence[str]) -> ClassScores:
    try:
        classes = read_json(path)["classes"]
        row = {name: classes[name]["dice"] for name in names}
        if not all(value is None or 0 <= value <= 1 for value in row.values()):
            raise ValueError("Dice outside of 0 to 1")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the quality of a case as medconv predict --quality writes it, with a Dice for "
            f"{', '.join(names)} ({type(error).__name__}: {error})"
        ) from error
    return row


def compared(
    predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], names: Sequence[str]
) -> dict[str, Any]:
    """Class to `n` cases in which both Dice are defined, their rank correlation `spearman`, `difference`:
    predicted minus true, the mean, and `mae`: the mean without its sign; `calibration`: slope and intercept
    of the line from predicted to true Dice, for `predict --calibration`, and `mae_calibrated`: its mean error
    on cases that were left out, one by one, when it was fitted. None: undefined.

    Args: predicted, true: case to Dice of each class.
    """
    return {name: _of_class(*_both(predicted, true, name)) for name in names}


def chart(
    predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], names: Sequence[str]
) -> bytes:
    """PNG: predicted against true Dice, a panel per class, at most six; a dot is a case, the line the
    calibration."""
    values = np.array(
        [[[row[case][name] for name in names] for case in predicted] for row in (predicted, true)], float
    )
    lines = [_fitted(*_both(predicted, true, name)) for name in names]
    return visualization.png(plots.scatter(names, values[0], values[1], lines))


def _both(
    predicted: Mapping[str, ClassScores], true: Mapping[str, ClassScores], name: str
) -> tuple[np.ndarray, np.ndarray]:
    pairs = ((predicted[case][name], true[case][name]) for case in predicted)
    values = np.array([pair for pair in pairs if None not in pair], float).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def _of_class(predicted: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    if not len(true):
        return {"n": 0, **dict.fromkeys(("spearman", "difference", "mae", "calibration", "mae_calibrated"))}
    with warnings.catch_warnings():  # of constant values, whose correlation is undefined
        warnings.simplefilter("ignore")
        rho = float(spearmanr(predicted, true).statistic) if len(true) >= _FEWEST else np.nan
    difference = predicted - true
    return {
        "n": len(true),
        "spearman": rho if np.isfinite(rho) else None,
        "difference": float(difference.mean()),
        "mae": float(np.abs(difference).mean()),
        "calibration": list(line) if (line := _fitted(predicted, true)) else None,
        "mae_calibrated": _left_out(predicted, true),
    }


def _fitted(predicted: np.ndarray, true: np.ndarray) -> quality.Line | None:
    """Least squares, never falling: agreement that says nothing leaves the mean. None: too few cases."""
    if len(true) < _FEWEST:
        return None
    spread = predicted - predicted.mean()
    slope = max(0.0, float(spread @ true)) / max(float(spread @ spread), 1e-12)
    return slope, float(true.mean() - slope * predicted.mean())


def _left_out(predicted: np.ndarray, true: np.ndarray) -> float | None:
    others = [np.arange(len(true)) != i for i in range(len(true))]
    lines = [_fitted(predicted[kept], true[kept]) for kept in others]
    expected = [quality.expected(p, line) for p, line in zip(predicted.tolist(), lines, strict=True)]
    if None in expected:
        return None
    return float(np.abs(np.array(expected, float) - true).mean())
