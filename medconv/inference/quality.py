"""How far the networks of an ensemble agree on a case: what `medconv predict --quality` writes.

The agreement stands for the Dice of a case whose reference nobody knows. It is only as good as it proves on
cases with a reference that no network was trained on: `medconv evaluate` compares the two, and fits the line
that turns the one into the other.
Source: pairwise Dice of an ensemble, Roy et al. 2019, doi:10.1016/j.neuroimage.2019.03.042; entropy of the
mean prediction, Mehrtash et al. 2020, doi:10.1109/TMI.2020.3006437.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medconv.data.datasets.common import read_json
from medconv.metrics.dice import mean
from medconv.metrics.statistics import describe
from medconv.targets.segmentation import SegmentationTargets

# In the output folder; a JSON file per case.
FOLDER = "quality"
# ml per mm^3.
_ML = 1e-3
# Slope and intercept of true Dice over the agreement.
Line = tuple[float, float]


def agreement(
    label_maps: Sequence[np.ndarray],
    targets: SegmentationTargets,
    voxel_mm3: float,
) -> dict[str, Any]:
    """Per class: mean and lowest Dice over all pairs of networks, mean and standard deviation of the volume.

    A pair in which neither network finds the class does not count; `dice` is None where no network does.

    Args:
        label_maps: one per network, at least two, all of one shape.
        voxel_mm3: volume of a voxel.
    """
    pairwise = [targets.dice(first, second) for first, second in combinations(label_maps, 2)]
    classes: dict[str, Any] = {}
    for name, values in targets.by_name.items():
        scores: list[float] = []
        for dice in pairwise:
            score = dice[name]
            if score is not None:
                scores.append(score)
        voxels = [np.isin(label, values).sum() for label in label_maps]
        volumes = describe([count * voxel_mm3 * _ML for count in voxels])
        classes[name] = {
            "dice": mean(dict(enumerate(scores))),
            "lowest_dice": min(scores, default=None),
            "volume_ml": volumes["mean"],
            "volume_sd_ml": volumes["sd"],
        }
    return {"networks": len(label_maps), "classes": classes}


def read_calibration(path: Path, names: Sequence[str]) -> dict[str, Line | None]:
    """Class to its line in a file of `medconv evaluate`; None: there were too few cases.

    Args:
        names: of the classes.
    Raises:
        ValueError: no such file, or it has no line for one of these classes.
    """
    lines: dict[str, Line | None] = {}
    try:
        rows = read_json(path)["quality"]["per_class"]
        for name in names:
            line = rows[name]["calibration"]
            lines[name] = line and (float(line[0]), float(line[1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path}: expected what medconv evaluate writes of predictions with --quality, with a "
            f"calibration for {', '.join(names)} ({type(error).__name__}: {error})"
        ) from error
    return lines


def calibrated(
    result: dict[str, Any],
    lines: Mapping[str, Line | None],
) -> dict[str, Any]:
    """An `agreement` with the Dice to be expected of each class in `lines`, `expected_dice`."""
    for name, line in lines.items():
        values = result["classes"][name]
        values["expected_dice"] = expected(values["dice"], line)
    return result


def expected(dice: float | None, line: Line | None) -> float | None:
    """The true Dice to be expected of an agreement, from 0 to 1. None: no agreement, or no line."""
    if dice is None or line is None:
        return None
    slope, intercept = line
    return min(1.0, max(0.0, slope * dice + intercept))


def uncertainty(
    probabilities: Iterable[Tensor],
    num_outputs: int,
    exclusive: bool,
) -> Tensor:
    """Entropy of each voxel, from 0 (certain) to 1 (all classes alike); of regions, the largest one.

    Shape: `num_outputs` channels, one (*spatial) at a time -> (*spatial) float32.

    Args:
        exclusive: whether the channels add up to 1, as of classes; else each is a region.
    """
    total: Tensor | None = None
    for p in probabilities:
        if exclusive:
            # One term of the sum over classes.
            entropy = -torch.xlogy(p, p) / log(num_outputs)
            total = entropy if total is None else total.add_(entropy)
        else:
            # Of a region: it is there, or it is not.
            entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)) / log(2)
            total = entropy if total is None else torch.maximum(total, entropy)
    assert total is not None
    return total.clamp_(0, 1)
