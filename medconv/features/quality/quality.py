"""How far the networks of an ensemble agree on a case, or how sure a single one is: what `medconv predict
--quality` writes.

It stands for the Dice of a case whose reference nobody knows. It is only as good as it proves on cases with a
reference that no network was trained on: `medconv evaluate` compares the two, and fits the line that turns
the one into the other.
Source: pairwise Dice of an ensemble, Roy et al. 2019, doi:10.1016/j.neuroimage.2019.03.042; soft Dice
confidence of one network, Borges et al. 2024, arXiv:2402.10665; entropy of the mean prediction, Mehrtash et
al. 2020, doi:10.1109/TMI.2020.3006437.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, islice
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
# What `dice` in such a file is: of several networks, and of one.
PAIRWISE = "pairwise_dice"
SOFT = "soft_dice_confidence"
# Slope and intercept of true Dice over the agreement.
Line = tuple[float, float]


def agreement(
    label_maps: Sequence[np.ndarray], targets: SegmentationTargets, voxel_mm3: float
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
            "dice": mean(scores),
            "lowest_dice": min(scores, default=None),
            "volume_ml": volumes["mean"],
            "volume_sd_ml": volumes["sd"],
        }
    return {"networks": len(label_maps), "method": PAIRWISE, "classes": classes}


def soft_dice_sums(
    probabilities: Iterable[Tensor], label: Tensor, targets: SegmentationTargets
) -> np.ndarray:
    """What the soft Dice of probabilities and their own label map is made of; it adds up over a case's slabs.

    Shape: `num_outputs` channels, one (*spatial) at a time, and label (*spatial) -> (names, 2): the
        probability in the voxels of the label; all of the probability plus these voxels.
    """
    # Regions have none
    num_backgrounds = targets.num_outputs - len(targets.names)
    foreground = islice(probabilities, num_backgrounds, None)
    sums = []
    for channel, values in zip(foreground, targets.values, strict=True):
        mask = torch.isin(label, torch.tensor(values, device=label.device))
        common = channel[mask].sum(dtype=torch.float64)
        sums.append([float(common), float(channel.sum(dtype=torch.float64) + mask.sum())])
    return np.array(sums)


def confidence(
    label_map: np.ndarray, sums: np.ndarray, targets: SegmentationTargets, voxel_mm3: float
) -> dict[str, Any]:
    """As `agreement`, of one network: as `dice` how sure it is of each class, 1 where all probabilities are 0
    or 1, and None where it does not find the class; and the volume.

    Args:
        sums: over the case, of `soft_dice_sums`.
        voxel_mm3: volume of a voxel.
    """
    classes: dict[str, Any] = {}
    for (name, values), (common, size) in zip(targets.by_name.items(), sums.tolist(), strict=True):
        num_voxels = int(np.isin(label_map, values).sum())
        dice = 2 * common / size if num_voxels else None
        classes[name] = {"dice": dice, "volume_ml": num_voxels * voxel_mm3 * _ML}
    return {"networks": 1, "method": SOFT, "classes": classes}


def read_calibration(path: Path, names: Sequence[str], method: str = PAIRWISE) -> dict[str, Line | None]:
    """Class to its line in a file of `medconv evaluate`; None: there were too few cases.

    Args:
        names: of the classes.
        method: `PAIRWISE` or `SOFT`, which the line is for.
    Raises:
        ValueError: no such file, it has no line for one of these classes, or it is of another method.
    """
    lines: dict[str, Line | None] = {}
    try:
        content = read_json(path)["quality"]
        rows = content["per_class"]
        method_there = content.get("method", PAIRWISE)
        for name in names:
            line = rows[name]["calibration"]
            lines[name] = line and (float(line[0]), float(line[1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path}: has no calibration for {', '.join(names)}; expected what medconv evaluate writes of "
            "predictions that medconv predict --quality made"
        ) from error
    if method_there != method:
        raise ValueError(f"{path}: its calibration is of {method_there}, these predictions have {method}")
    return lines


def calibrated(result: dict[str, Any], lines: Mapping[str, Line | None]) -> dict[str, Any]:
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


def uncertainty(probabilities: Iterable[Tensor], num_outputs: int, exclusive: bool) -> Tensor:
    """Entropy of each voxel, from 0 (certain) to 1 (all classes alike); of regions, the largest one.

    Shape: `num_outputs` channels, one (*spatial) at a time -> (*spatial) float32.

    Args:
        exclusive: whether the channels add up to 1, as of classes; else each is a region.
    """
    total: Tensor | None = None
    for probability in probabilities:
        p = probability.clamp(0, 1)  # a mean of several networks may be above 1 by rounding
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
