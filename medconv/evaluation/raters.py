"""References of several raters: their consensus, and the Dice against each of them and among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid, Relabel
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_label
from medconv.data.io.label_values import relabels
from medconv.evaluation import labels
from medconv.metrics import dice as metrics_dice
from medconv.metrics.consensus import CONSENSUS
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some

AMONG = "among raters"  # beside the raters' paths, in rows and results
RATER_DICE = "rater_dice"  # in the row of a case: rater to class to Dice
RaterFile = tuple[Path, np.ndarray]


@dataclass(frozen=True)
class Raters:
    """Further raters of the references.

    Args:
        files: folder or pattern of a rater to case to label map; a rater may lack cases.
        relabel: the same to how the file of each case is read.
        consensus: a name of `CONSENSUS`.
    """

    files: Mapping[str, Mapping[str, Path]]
    relabel: Mapping[str, Mapping[str, Relabel | None]]
    consensus: str

    def label_maps(self, case: str, like: Path, reference_file: Path, grid: Grid) -> dict[str, RaterFile]:
        """The file of each rater that has this case, and its label map on the grid of the reference.

        Raises:
            ValueError: as `read_label`, or a grid that differs from that of the reference.
        """
        label_maps = {}
        for rater, files in self.files.items():
            if case in files:
                label, rater_grid = read_label(files[case], like, self.relabel[rater][case])
                label = on_grid(label, reference_file, grid, files[case], rater_grid)
                label_maps[rater] = (files[case], label)
        return label_maps

    def reference(self, label_maps: Sequence[np.ndarray], ignore: int | None) -> np.ndarray:
        """The consensus; voxels that any rater leaves unlabelled have the value to ignore."""
        if len(label_maps) == 1:
            return label_maps[0]
        method = CONSENSUS[self.consensus]
        if ignore is None:
            return method(label_maps)
        is_ignored = np.any([label_map == ignore for label_map in label_maps], axis=0)
        consensus = np.full(is_ignored.shape, ignore, np.int16)
        if not is_ignored.all():  # of the others alone, of which STAPLE learns
            consensus[~is_ignored] = method([label_map[~is_ignored] for label_map in label_maps])
        return consensus


def raters_of(
    paths: Sequence[Path],
    consensus: str | None,
    references: Mapping[str, Path],
    targets: SegmentationTargets | None,
    annotated: Sequence[str] = (),
    renumbered: Relabel | None = None,
) -> Raters:
    """The raters at these paths.

    Args:
        paths: a folder or a pattern with `{id}` for each rater.
        consensus: None: majority.
        references: case to the file of the first rater.
        targets: None: classes are numbered.
        annotated: as of `segmentation.evaluate`.
        renumbered: as of `labels.renumbering`.
    Raises:
        ArgumentError: a rater without any of the cases, one given twice, or a consensus without raters.
    """
    if consensus is not None and not paths:
        raise ArgumentError("consensus", f" {consensus}: needs raters besides the references")
    if consensus not in (None, *CONSENSUS):
        raise ArgumentError("consensus", f" must be one of {', '.join(CONSENSUS)}, got {consensus}")
    class_names = labels.class_names_of(targets)
    ignore = targets.ignore if targets else None
    files: dict[str, dict[str, Path]] = {}
    relabel: dict[str, dict[str, Relabel | None]] = {}
    known = [{case: file.resolve() for case, file in references.items()}]
    for path in paths:
        of_rater = labels.label_files(path, "raters", class_names)
        known.append({case: file.resolve() for case, file in of_rater.items()})
        if known[-1] in known[:-1]:
            raise ArgumentError("raters", f" {path}: given twice, or the references themselves")
        if not set(of_rater) & set(references):
            raise ArgumentError("raters", f" {path}: no label map there for {some(sorted(references), 3)}")
        rater = str(path)
        relabel[rater] = relabels(of_rater, class_names, ignore, renumbered)
        files[rater] = labels.with_annotated_structures(
            of_rater, relabel[rater], annotated, targets, references
        )
    return Raters(files, relabel, consensus or "majority")


def numbered_of(label_maps: Sequence[np.ndarray]) -> SegmentationTargets:
    """A class for each label value of these label maps."""
    values: set[int] = set()
    for label_map in label_maps:
        values |= labels.values_in(label_map)
    return labels.numbered(values)


def checked(references: Mapping[str, RaterFile], targets: SegmentationTargets) -> dict[str, np.ndarray]:
    """Rater to label map, with one value to ignore. Raises: ValueError: a value that is not declared."""
    label_maps = {}
    for rater, (path, label_map) in references.items():
        label_maps[rater] = targets.one_ignored(label_map)
        # Only a reference may hold the value to ignore.
        labels.check_declared(path, label_maps[rater], targets, targets.ignore)
    return label_maps


def rater_dice(
    prediction: np.ndarray, label_maps: Mapping[str, np.ndarray], targets: SegmentationTargets
) -> dict[str, Any]:
    """For the row of a case: Dice of each class against each rater, and its mean over pairs of raters."""
    dice = {rater: targets.dice(prediction, label_map) for rater, label_map in label_maps.items()}
    pairs = []
    for first, second in combinations(label_maps.values(), 2):
        if targets.ignore is not None:  # what either of them left unlabelled
            second = np.where(first == targets.ignore, first, second)
        pairs.append(targets.dice(first, second))
    if pairs:
        dice[AMONG] = metrics_dice.mean_per_class(pairs)
    return {RATER_DICE: dice}


def summarize_raters(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], consensus: str
) -> dict[str, Any]:
    """The keys `consensus` and `raters` of a result; empty if no case has several raters.

    `raters` has for each rater, and for `AMONG`, `dice`, the mean over classes of the means over cases, its
    `per_class` and `n`, the number of cases.
    """
    rated = [row[RATER_DICE] for row in rows if RATER_DICE in row]
    if not rated:
        return {}
    raters = {}
    # in the order of the arguments, whichever cases a rater lacks
    order = [*dict.fromkeys(rater for dice in rated for rater in dice if rater != AMONG), AMONG]
    for rater in order:
        scores = [dice[rater] for dice in rated if rater in dice]
        complete = [{name: score.get(name) for name in names} for score in scores]
        per_class = metrics_dice.mean_per_class(complete)
        raters[rater] = {
            "dice": metrics_dice.mean(per_class.values()),
            "per_class": per_class,
            "n": len(scores),
        }
    return {"consensus": consensus, "raters": raters}
