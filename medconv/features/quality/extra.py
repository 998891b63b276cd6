"""What `medconv predict --quality` adds: the agreement or confidence of a case, and a map of uncertainty."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medconv.data.case import Case
from medconv.data.io.writing import write_channels
from medconv.data.preprocessing.preprocess import Slab, to_native
from medconv.features.quality import quality
from medconv.inference.extras import Extra
from medconv.inference.slab_answer import Group, LabelMapScores, SlabLogits, label_type, with_cpu_fallback
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.atomic_io import write_text

log = logging.getLogger(__name__)


def of_options(options: argparse.Namespace) -> Quality:
    """Raises: ValueError: a calibration of nothing."""
    if not options.quality:
        raise ValueError("--calibration turns what --quality measures into Dice: add --quality")
    return Quality(Path(options.calibration) if options.calibration else None)


class QualityAnswer:
    """How sure the networks are of a case, on the grid of its content.

    Attributes:
        uncertainty: (R, A, S) float32, as `quality.uncertainty`.
        label_maps: of each network.
        soft_dice_sums: of one network, as `quality.soft_dice_sums`; None: several.
    """

    def __init__(self, groups: Sequence[Group], targets: SegmentationTargets) -> None:
        grid = groups[0].grid
        self._axis = grid.axis
        shape = grid.crop_info.content_shape
        self.uncertainty = np.empty(shape, np.float32)
        self.label_maps = [np.empty(shape, label_type(targets)) for group in groups for _ in group.sources]
        self.soft_dice_sums = np.zeros((len(targets.names), 2)) if len(self.label_maps) == 1 else None

    def put(self, slab: Slab, mean: SlabLogits, networks: Sequence[SlabLogits]) -> None:
        planes = slice(slab.first, slab.stop)
        np.moveaxis(self.uncertainty, self._axis, 0)[planes] = with_cpu_fallback(_uncertainty, mean)
        for label_map, network in zip(self.label_maps, networks, strict=True):
            label = with_cpu_fallback(SlabLogits.label, network)
            np.moveaxis(label_map, self._axis, 0)[planes] = label
        if self.soft_dice_sums is not None:
            self.soft_dice_sums += with_cpu_fallback(_soft_dice_sums, mean)


def _uncertainty(logits: SlabLogits) -> np.ndarray:
    """Shape: (planes, *in_plane) of the content, float32."""
    targets = logits.targets
    entropy = quality.uncertainty(logits.mean_probabilities(), targets.num_outputs, targets.exclusive)
    return entropy.cpu().numpy()


def _soft_dice_sums(logits: SlabLogits) -> np.ndarray:
    label = torch.from_numpy(logits.label()).to(logits.logits[0].device)
    return quality.soft_dice_sums(logits.mean_probabilities(), label, logits.targets)


class Quality(Extra):
    """Args: calibration: a file of `medconv evaluate`, which gives `expected_dice`; None: nothing does."""

    flag = "--quality"
    needs_logits = True

    def __init__(self, calibration: Path | None = None) -> None:
        self._path = calibration
        self._lines: dict[str, quality.Line | None] = {}  # by class

    def begin(self, predictor: Any, cases: Sequence[Case]) -> None:
        if self._path is None:
            return
        method = quality.PAIRWISE if len(predictor.members) > 1 else quality.SOFT
        self._lines = quality.read_calibration(self._path, predictor.targets.names, method)
        for name, line in self._lines.items():
            if line is None:
                log.warning("%s: no calibration of %s, there were too few cases", self._path, name)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"quality": True}
        if self._lines:
            settings["calibration"] = {name: line and list(line) for name, line in self._lines.items()}
        return settings

    def answer(self, groups: Sequence[Group], targets: SegmentationTargets) -> QualityAnswer:
        return QualityAnswer(groups, targets)

    def write(
        self, folder: Path, predictor: Any, case: Case, scores: LabelMapScores, answer: np.ndarray
    ) -> None:
        path = folder / "uncertainty" / f"{case.id}.nii.gz"
        write_channels(path, [uncertainty_of(scores)], 1, case.images[0])
        result = quality.calibrated(quality_of(scores), self._lines)
        path = folder / quality.FOLDER / f"{case.id}.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(result, indent=2) + "\n")


def uncertainty_of(scores: LabelMapScores) -> np.ndarray:
    """On the image's own grid, (X, Y, Z) float32; 0 outside the crop."""
    return to_native(_answer(scores).uncertainty, scores.crop)


def quality_of(scores: LabelMapScores) -> dict[str, Any]:
    """As `quality.agreement` between the networks, or `quality.confidence` of one."""
    answer, voxel_mm3 = _answer(scores), scores.crop.grid.voxel_mm3
    if answer.soft_dice_sums is None:
        return quality.agreement(answer.label_maps, scores.targets, voxel_mm3)
    return quality.confidence(scores.label, answer.soft_dice_sums, scores.targets, voxel_mm3)


def _answer(scores: LabelMapScores) -> QualityAnswer:
    answer = scores.answers[Quality.flag]
    assert isinstance(answer, QualityAnswer)
    return answer
