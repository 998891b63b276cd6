"""From the outputs of the networks to an image in the target's units, in prediction and in validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from medconv.config import ConfigError, RunConfig
from medconv.data.augmentation.parameters import INTENSITY
from medconv.data.case import Case
from medconv.data.io.writing import write_image
from medconv.data.loading.patch import Batch
from medconv.data.preprocessing.preprocess import CropInfo, to_native
from medconv.features.continuous.labels import check_first_channel, on_prepared_grid
from medconv.features.continuous.metrics import measure
from medconv.features.continuous.targets import ContinuousTargets, scale_of
from medconv.inference.output import OutputDir
from medconv.inference.predictor import LabelMapForward, Predictor
from medconv.inference.prepare import Input, NamedImage
from medconv.inference.slab_answer import Group
from medconv.inference.sliding_window import SlidingWindow
from medconv.training.validation import Validated, group_of, warn_of_nonfinite


@dataclass(frozen=True)
class ImageAnswer:
    """The networks' answer for a case.

    Args:
        outputs: the content in canonical axes and in units of the loss, (R, A, S) float32.
        crop: where the content lies in the image.
        image: the first channel of the input, (X, Y, Z).
    """

    outputs: np.ndarray
    crop: CropInfo
    targets: ContinuousTargets
    image: np.ndarray

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return torch.from_numpy(self.outputs)

    def answer(self) -> np.ndarray:
        """The predicted image on the grid of the input, (X, Y, Z) float32."""
        mean, std = self.targets.scale(self.image)
        content = (self.outputs * std + mean).astype(np.float32)
        return to_native(content, self.crop, outside=self.targets.outside)


def outputs_of(groups: Sequence[Group], images: Sequence[np.ndarray | None]) -> np.ndarray:
    """The weighted mean of the networks' images on the content, slab by slab. Shape: (R, A, S) float32.

    Args: images: of each group, to which outputs are the difference, (*spatial) on its prepared grid; None:
        outputs are images themselves.
    """
    grid = groups[0].grid
    # The sum is resampled, not the difference alone: noise that is resampled does not cancel noise
    bases = [None if each is None else torch.from_numpy(each).movedim(grid.axis, 0) for each in images]
    content = np.empty(grid.crop_info.content_shape, np.float32)
    planes = np.moveaxis(content, grid.axis, 0)
    for slabs in zip(*(group.grid.slabs() for group in groups), strict=True):
        mean: Any = 0
        for group, slab, base in zip(groups, slabs, bases, strict=True):
            outputs = group.mean(slab.sources.start, slab.sources.stop)
            if base is not None:
                outputs = outputs + base[slab.sources].to(outputs.device)
            (channel,) = group.grid.channels(outputs, slab)
            mean = mean + group.weight * channel
        planes[slabs[0].first : slabs[0].stop] = mean.cpu().numpy()
    return content


def kept(targets: ContinuousTargets, image: NamedImage) -> np.ndarray:
    """As `Family.keeps`: the first channel, the quantity of which the answer is with `same_units`.

    Raises: ValueError: it is missing then.
    """
    check_first_channel(targets, image.case)
    first: np.ndarray = image.voxels[0]
    return first


class ImageForward(LabelMapForward):
    """Sliding windows, as for label maps; the mean of the outputs."""

    def __call__(  # type: ignore[override]
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> list[ImageAnswer]:
        targets = self.members[0].targets
        assert isinstance(targets, ContinuousTargets)
        answers = []
        for case_input in inputs:
            groups = self._groups(case_input, keeps_logits=False, only_labels=False)
            images: list[np.ndarray | None] = [None] * len(groups)
            if targets.same_units:
                mean, std = scale_of(case_input.kept)
                native = (case_input.kept[None] - mean) / std
                prepared = zip(case_input.crops, self.preprocessings, strict=True)
                images = [on_prepared_grid(native, crop, config)[0] for crop, config in prepared]
            outputs = outputs_of(groups, images)
            answers.append(ImageAnswer(outputs, case_input.crops[0], targets, case_input.kept))
        return answers


@dataclass(frozen=True)
class ImageValidation:
    """The scores of one case at a time, on its original grid, by slabs as in prediction."""

    window: SlidingWindow
    targets: ContinuousTargets

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated:
        window = self.window.in_small_batches(1, batch["image"].device)
        group = group_of(window, network, batch, only_labels=False)
        crop_info = group.grid.crop_info
        native = batch["native"].value
        base = batch["label"][0, 1].numpy() if self.targets.same_units else None
        outputs = outputs_of([group], [base])
        prediction = ImageAnswer(outputs, crop_info, self.targets, native).answer()
        reference = batch["reference"].numpy()
        row = measure(prediction, reference)
        if not np.isfinite(prediction).all():
            warn_of_nonfinite(batch["case"])
        predicted: dict[str, Any] = {}
        if keeps_prediction:
            images = {"image": native, "prediction": prediction, "reference": reference}
            predicted = {"case": batch["case"], "row": row, "images": images, "grid": crop_info.grid}
        return Validated({batch["case"]: row}, predicted)


def image_validation(config: RunConfig, targets: ContinuousTargets, window: SlidingWindow) -> ImageValidation:
    """As `Family.validation`.

    Raises:
        ConfigError: an augmentation changes the image, but not the target that is the same quantity.
    """
    probabilities = config.augmentation.get("p") or {}
    # A network that learns the difference to the image would undo them
    of_images_alone = [f"p.{name}={probabilities[name]}" for name in INTENSITY if probabilities.get(name)]
    for transform in config.augmentation.get("transforms") or ():  # of MONAI
        if "label" not in transform.get("keys", "label"):
            of_images_alone.append(f"transforms: {transform['_target_'].rpartition('.')[2]}")
    if targets.same_units and of_images_alone:
        raise ConfigError(
            f"augmentation.{of_images_alone[0]} changes the image alone, but data.layout.same_units=true "
            "learns the difference to it; use augmentation=flips"
        )
    return ImageValidation(window, targets)


class OutputImages(OutputDir):
    """Where predicted images go, as float32 NIfTI; a case is done once its image exists."""

    result_name: ClassVar[str] = "images"
    own_suffix = ".nii.gz"  # other formats round to whole numbers

    def __init__(self, path: Path, targets: ContinuousTargets, settings: Any, about: Any) -> None:
        super().__init__(path, settings, about)

    def write(self, predictor: Predictor, case: Case, scores: Any) -> None:
        write_image(self.label(case.id), predictor.answer(scores), case.images[0])
