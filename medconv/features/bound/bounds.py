"""Lower bounds of the Dice of cases without a reference, which hold in a chosen share of cases.

Split conformal prediction: on cases with a reference, how far does the true Dice fall below the one that
`medconv predict --quality` estimates? The k-th smallest of these n distances, k = ceil((n + 1) share), is
subtracted from a new case's estimate. If the new case is exchangeable with these n, which a case from another
scanner is not, the bound holds with a probability of at least that share, whatever the estimate is worth: a
poor one makes the bounds low, not wrong.
Source: Vovk et al. 2005, doi:10.1007/b106715; of segmentation quality: Wundram et al. 2024, arXiv:2407.13307.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from filelock import FileLock

from medconv.data.datasets.common import read_json
from medconv.data.io.manifest import LOWER_BOUNDS, MANIFEST, read_manifest
from medconv.features.quality import predicted_quality, quality
from medconv.metrics.dice import ClassScores
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text, original
from medconv.utils.locks import held
from medconv.utils.logging import some

log = logging.getLogger(__name__)
FILE = "bounds.csv"  # in the folder of the predictions
_HEADER = ("case", "class", "estimated_dice", "lower_bound", "share")


@dataclass(frozen=True)
class Bound:
    """A row of the table.

    Args:
        estimate: what `predict --quality` wrote; None: the networks do not find the class.
        lower: at least so much is the true Dice, in `share` of such cases; None: no estimate, or too few
            cases with a reference.
    """

    case: str
    name: str
    estimate: float | None
    lower: float | None
    share: float


def margin(estimated: Sequence[float], true: Sequence[float], share: float) -> float | None:
    """How far the true Dice falls below the estimated one at most, in this share of cases.

    Args: share: between 0 and 1.
    Returns: None: too few cases for this share, fewer than share / (1 - share).
    """
    distances = sorted(guess - truth for guess, truth in zip(estimated, true, strict=True))
    # rounded, so that 0.9 of 10 is 9 in spite of its binary form
    rank = ceil(round((len(distances) + 1) * share, 9))
    return distances[rank - 1] if rank <= len(distances) else None


def margins(content: Any, path: Path, share: float) -> tuple[str, dict[str, float | None]]:
    """The method of the estimates in the content of a file of `medconv evaluate`, and class to its margin;
    None: too few cases.

    Raises:
        ValueError: it has no estimates beside the true Dice.
    """
    try:
        method = str(content[predicted_quality.KEY].get("method", quality.PAIRWISE))
        estimated: Mapping[str, ClassScores] = content[predicted_quality.KEY]["cases"]
        true: dict[str, ClassScores] = {row["case"]: row["dice"] for row in content["cases"]}
        names = list(content[predicted_quality.KEY]["per_class"])
        found = {}
        for name in names:
            pairs = [(values[name], true[case][name]) for case, values in estimated.items()]
            # undefined where neither label map has the class
            defined = [(guess, truth) for guess, truth in pairs if guess is not None and truth is not None]
            found[name] = margin([guess for guess, _ in defined], [truth for _, truth in defined], share)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: has no estimates beside true Dice; expected what medconv evaluate writes of "
            "predictions that medconv predict --quality made"
        ) from error
    return method, found


def bounds(predictions: Path, calibration: Path, share: float) -> list[Bound]:
    """The bounds of all cases that `medconv predict --quality` wrote to a folder, case by case.

    Args:
        calibration: of `medconv evaluate`, of other cases, predicted by the same networks.
    Raises:
        ValueError: no such file, no estimates, or those of another method; as `margins` says.
    """
    content = read_json(calibration)
    method_there, found = margins(content, calibration, share)
    folder = predictions / quality.FOLDER
    cases = sorted(path.stem for path in folder.glob("*.json"))
    if not cases:
        raise ValueError(f"{predictions}: no estimates of Dice; predict with --quality")
    _warn_of_known(cases, content, calibration)
    method = predicted_quality.method(predictions, cases)
    if method != method_there:
        raise ValueError(f"{calibration}: its estimates are {method_there}, those of {predictions} {method}")
    rows = []
    for case, scores in predicted_quality.read(predictions, list(found), cases).items():
        for name, distance in found.items():
            estimate = scores[name]
            lower = None
            if estimate is not None and distance is not None:
                lower = min(1.0, max(0.0, estimate - distance))
            rows.append(Bound(case, name, estimate, lower, share))
    return rows


def _warn_of_known(cases: Sequence[str], content: Mapping[str, Any], calibration: Path) -> None:
    """Tell of cases that are not exchangeable with new ones. Args: cases: to be bounded."""
    trained = content.get("train_cases") or []
    if trained:
        log.warning(
            "%s: the networks were trained on %d of its cases (%s), where Dice is higher than on new ones; "
            "bounds are too high",
            *(calibration, len(trained), some(trained)),
        )
    calibrated = {row["case"] for row in content["cases"]}
    common = [case for case in cases if case in calibrated]
    if common:
        log.warning(
            "%s also has %d of the cases to bound (%s); how often these bounds hold says nothing of others",
            *(calibration, len(common), some(common)),
        )


def write(rows: Sequence[Bound], folder: Path, limit: float | None = None) -> None:
    """`bounds.csv` in a folder of predictions, and in its manifest the bounds of each case.

    Args: limit: of bounds; the cases below it, or without a bound, are those that a person should look at.
    """
    table: list[Sequence[object]] = [(*_HEADER, "look_at")]
    cases: dict[str, dict[str, float | None]] = {}
    for row in rows:
        look_at = "" if limit is None else int(is_below(row, limit))
        table.append((row.case, row.name, row.estimate, row.lower, row.share, look_at))
        cases.setdefault(row.case, {})[row.name] = row.lower
    write_text(folder / FILE, csv_text(table))
    look_at_cases = None
    if limit is not None:
        look_at_cases = sorted({row.case for row in rows if is_below(row, limit)})
    content = {"share": rows[0].share, "cases": cases, "limit": limit, "look_at": look_at_cases}
    with held(FileLock(folder / ".lock")):  # as processes that predict hold it
        manifest = read_manifest(folder)
        if manifest:
            text = json.dumps({**manifest, LOWER_BOUNDS: content}, indent=2)
            write_text(folder / MANIFEST, text + "\n")


def is_below(row: Bound, limit: float) -> bool:
    """Whether the Dice may be lower than the limit."""
    return row.lower is None or row.lower < limit


def read(path: Path) -> list[Bound]:
    """Raises: ValueError: not a table of `write`."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                case, name, estimate, lower, share = (row[column] for column in _HEADER)
                bound = Bound(original(case), original(name), _number(estimate), _number(lower), float(share))
                rows.append(bound)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: expected the columns {', '.join(_HEADER)} as medconv bound writes them "
                    f"({type(error).__name__}: {error})"
                ) from error
    return rows


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
