"""How well predicted objects match those of a reference: average precision, panoptic quality and counts.

A row of a case, as a checkpoint's `validation` and the result of an evaluation have it, holds the numbers of
`reference` and `predicted` objects; those `matched` at each of `THRESHOLDS`; the sum of the `overlaps` of
those that match at 0.5; and the Dice of all objects together.
Source: average precision of an image as in the Data Science Bowl, Caicedo et al. 2019,
doi:10.1038/s41592-019-0612-7; panoptic quality, Kirillov et al. 2019, arXiv:1801.00868.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medconv.metrics import lesions
from medconv.metrics.dice import mean

Row = dict[str, Any]
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
DEFINITIONS = {
    "AP50": "average precision: of each image the matched objects over matched, missed and wrong ones, where "
    "objects match at an intersection over union of 0.5 or more (AP75: 0.75).",
    "AP": "the mean of the average precision at nine thresholds, 0.5, 0.55, ... 0.9.",
    "PQ": "panoptic quality: the sum of the intersections over union of objects that match at 0.5, over the "
    "mean number of predicted and true objects.",
    "Dice": "of all objects together, whichever they are.",
}


def row_of(prediction: np.ndarray, reference: np.ndarray) -> Row:
    """The row of a case. Shape: two object maps of the same shape, integers."""
    matched = lesions.match_numbered(prediction, reference, THRESHOLDS[0])
    voxels = int((prediction > 0).sum()) + int((reference > 0).sum())
    shared = int(((prediction > 0) & (reference > 0)).sum())
    overlaps = np.array(matched.overlaps)
    return {
        "reference": matched.reference,
        "predicted": matched.predicted,
        "matched": [int((overlaps >= threshold).sum()) for threshold in THRESHOLDS],
        "overlaps": float(overlaps.sum()),
        "dice": 2 * shared / voxels if voxels else None,
    }


def scores_of(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Scores of a case; None where neither map has an object."""
    num_objects = row["reference"] + row["predicted"]
    if not num_objects:
        return dict.fromkeys(("ap", "ap50", "ap75", "pq", "dice"))
    precisions = [matched / (num_objects - matched) for matched in row["matched"]]
    return {
        "ap": float(np.mean(precisions)),
        "ap50": precisions[0],
        "ap75": precisions[THRESHOLDS.index(0.75)],
        "pq": 2 * row["overlaps"] / num_objects,
        "dice": row["dice"],
    }


def means_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the cases with objects; `ap_per_threshold`; over the objects of all cases together
    `ap50_pooled`; and how many objects there are.
    """
    scores = [scores_of(row) for row in rows]
    means: dict[str, Any] = {}
    for name in scores[0] if scores else ():
        means[name] = mean(of_case[name] for of_case in scores)
    numbers = [(row["reference"] + row["predicted"], row["matched"]) for row in rows]
    numbers = [(num_objects, matched) for num_objects, matched in numbers if num_objects]
    precisions = [np.array(matched) / (num_objects - np.array(matched)) for num_objects, matched in numbers]
    means["ap_per_threshold"] = np.mean(precisions, axis=0).tolist() if precisions else []
    total_matched = sum(matched[0] for _, matched in numbers)
    total = sum(num_objects for num_objects, _ in numbers)
    means["ap50_pooled"] = total_matched / (total - total_matched) if total else None
    means["reference_objects"] = sum(row["reference"] for row in rows)
    means["predicted_objects"] = sum(row["predicted"] for row in rows)
    return means
