"""From the outputs of the networks to points in mm, in prediction and in validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.config import ConfigError, RunConfig
from medconv.data.case import Case
from medconv.data.io.manifest import MANIFEST
from medconv.data.left_right import left_right_axis
from medconv.data.loading.patch import Batch
from medconv.data.preprocessing.preprocess import CropInfo
from medconv.features.landmarks.errors import row_of
from medconv.features.landmarks.heatmaps import peaks, sigmas, to_mm
from medconv.features.landmarks.points import as_points, write_points
from medconv.features.landmarks.targets import LandmarkTargets
from medconv.inference.output import OutputDir
from medconv.inference.predictor import LabelMapForward, Predictor
from medconv.inference.prepare import Input
from medconv.inference.sliding_window import SlidingWindow, training_axes
from medconv.training.validation import Validated, warn_of_nonfinite


@dataclass(frozen=True)
class PointAnswer:
    """Args: positions: (names, 3) mm, RAS, of the peaks. heights: (names,) of these, 0 to 1."""

    positions: np.ndarray
    heights: np.ndarray
    targets: LandmarkTargets
    crop: CropInfo

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return torch.from_numpy(self.positions)

    @property
    def found(self) -> np.ndarray:
        """Shape: (names,) bool."""
        return self.heights >= self.targets.threshold

    def answer(self) -> np.ndarray:
        """Shape: (names, 3) mm, right, anterior, superior; NaN: the point is absent."""
        return np.where(self.found[:, None], self.positions, np.nan)


def answer_of(
    logits: Tensor, crop: CropInfo, targets: LandmarkTargets, own: CropInfo | None = None
) -> PointAnswer:
    """Args: own: with the grid that points are in mm of; None: that of `crop`.

    Shape: logits (names, *spatial) on the prepared grid.
    """
    heatmaps = logits.float().sigmoid().cpu().numpy()
    shape = heatmaps.shape[1:]
    places, heights = peaks(heatmaps, sigmas(targets.sigma_mm, crop, shape))
    return PointAnswer(to_mm(places, own or crop, shape), heights, targets, own or crop)


class PointForward(LabelMapForward):
    """Sliding windows, as for label maps; with several preprocessings `mean_of` their answers."""

    def __call__(  # type: ignore[override]
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> list[PointAnswer]:
        targets = self.members[0].targets
        assert isinstance(targets, LandmarkTargets)
        answers = []
        for case_input in inputs:
            groups = self._groups(case_input, keeps_logits=True, only_labels=False)
            of_groups = []
            for group in groups:
                # heatmaps stay on the prepared grid, which takes far less than the image's own
                logits = group.mean(0, group.grid.source_length)
                crop = group.grid.crop_info
                own = _on_own_grid(crop, case_input)
                of_groups.append(answer_of(logits.movedim(1, 1 + group.grid.axis), crop, targets, own))
            answers.append(mean_of(of_groups, [group.weight for group in groups]))
        return answers


def mean_of(answers: Sequence[PointAnswer], weights: Sequence[float]) -> PointAnswer:
    """The mean height of each point, and the mean position of those that find it: where a network does not,
    its highest voxel is anywhere.

    Args: weights: of the answers, whose sum is 1.
    """
    shares = np.array(weights)[:, None]
    heights = (shares * np.stack([each.heights for each in answers])).sum(0)
    found = np.stack([each.found for each in answers])
    # an absent point has a position, too, by which two networks are compared
    counted = shares * np.where(found.any(0), found, True)
    positions = np.stack([each.positions for each in answers])
    mean = (counted[..., None] * positions).sum(0) / counted.sum(0)[:, None]
    return replace(answers[0], positions=mean, heights=heights)


def _on_own_grid(crop: CropInfo, case_input: Input) -> CropInfo:
    """Points are in mm of the image's header, also where another spacing was stated for the network."""
    own_grid = case_input.own_grid
    return crop if own_grid is None else replace(crop, grid=own_grid)


@dataclass(frozen=True)
class PointValidation:
    """The errors of one case at a time. A point below the threshold is missed, but its error counts, so that
    the mean does not improve by points that are not found."""

    window: SlidingWindow
    targets: LandmarkTargets

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated:
        image = batch["image"][0]
        window = self.window.in_small_batches(self.targets.num_outputs, image.device)
        logits = window(network, image[None])[0]
        if not bool(logits.isfinite().all()):
            warn_of_nonfinite(batch["case"])
            logits = torch.nan_to_num(logits)
        answer = answer_of(logits, batch["crop_info"].value, self.targets)
        reference = batch["reference"].numpy()
        row = row_of(answer.positions, answer.found, reference, self.targets.names)
        for point, height in zip(row.values(), answer.heights.tolist(), strict=True):
            point["height"] = height
        predicted: dict[str, Any] = {}
        if keeps_prediction:
            predicted = {"case": batch["case"], "heatmap": logits.float().sigmoid().amax(0).cpu().numpy()}
        return Validated({batch["case"]: row}, predicted)


def point_validation(config: RunConfig, targets: LandmarkTargets, window: SlidingWindow) -> PointValidation:
    """As `Family.validation`.

    Raises: ConfigError: images are mirrored from left to right, and nothing says which points swap.
    """
    axes = training_axes(config.augmentation, config.derived.spatial_dims)
    axis = left_right_axis(config.derived.slice_axis)
    # an empty list says that no names swap
    if axis in axes and len(targets.names) > 1 and config.data.flip_label_pairs is None:
        raise ConfigError(
            f"augmentation.mirror_axes={config.augmentation['mirror_axes']} exchanges left and right; name "
            "the points that swap, such as data.flip_label_pairs=[[left_eye,right_eye]], [] if none do, or "
            f"leave out axis {axis}"
        )
    return PointValidation(window, targets)


class OutputPoints(OutputDir):
    """Where points go, in the format of the training's; a case is done once its file exists."""

    result_name: ClassVar[str] = "files of points"

    def __init__(self, path: Path, targets: LandmarkTargets, settings: Any, about: Any) -> None:
        self.own_suffix = targets.suffix
        super().__init__(path, settings, about)

    def write(self, predictor: Predictor, case: Case, scores: Any) -> None:
        names = predictor.targets.names
        points = as_points(predictor.answer(scores), names)
        heights = dict(zip(names, scores.heights.tolist(), strict=True))
        write_points(self.label(case.id), points, case.id, heights)

    def _existing(self, manifest: Mapping[str, Any]) -> list[str]:
        # the manifest is JSON, too
        return [case for case in super()._existing(manifest) if self.label(case).name != MANIFEST]
