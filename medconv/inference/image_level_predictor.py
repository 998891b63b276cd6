"""From the files of cases to the outputs of image-level networks: class or label probabilities, or
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medconv.data.case import Case
from medconv.data.preprocessing.preprocess import CropInfo, resampled_shape
from medconv.inference import saliency
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Input, Predictor, autocast
from medconv.inference.tta import flips, mean_over_flips
from medconv.planning.topology import rounded_up
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.logging import size_text

_MAX_VOXELS = 2**21  # of all images in one forward pass
_MAX_IMAGES = 64  # in one forward pass


class ImageLevelPredictor(Predictor):
    """One network for classification or regression, or the mean of the outputs of several.

    Members may differ in preprocessing. Args: as in `Predictor`. batch_size: images in one forward
    pass; None: by their size. Raises: ValueError: members that were not trained for the same targets.
    """

    def __init__(
        self, members: Sequence[LoadedModel], device: str = "cpu", batch_size: int | None = None
    ) -> None:
        super().__init__(members, device)
        assert isinstance(self.targets, ImageLevelTargets)
        self.image_targets = self.targets
        largest = max(prod(member.window.patch_size) for member in self.members)
        self.batch_size = batch_size or max(1, min(_MAX_IMAGES, _MAX_VOXELS // largest))

    def predict(self, *images: Path | str) -> np.ndarray:
        """The outputs for a case, (outputs,), from its files: one per channel, or one with all channels.

        Raises: ValueError: as `read`.
        """
        paths = tuple(Path(path) for path in images)
        return self.predict_batch([self.read(Case(paths[0].name, paths))])[0]

    def read(self, case: Case) -> Input:
        """Raises: ValueError: its files cannot be read, or do not fit the network."""
        case_input = super().read(case)
        for member in self.members:
            size = case_input.arrays[self.preprocessings.index(member.preprocessing)].shape[1:]
            if tuple(size) != member.window.patch_size:
                actual, expected = map(size_text, (size, member.window.patch_size))
                raise ValueError(
                    f"{case.images[0]}: {actual} voxels after preprocessing, the network was trained on "
                    f"images of {expected}"
                )
            _check_size(case.images[0], member, case_input.crop)
        return case_input

    @torch.inference_mode()
    def predict_batch(self, inputs: Sequence[Input]) -> np.ndarray:
        """(cases, outputs), as `ImageLevelTargets.decode` gives them. Raises: ValueError: the network's
        outputs are not finite.
        """
        total = torch.stack(
            [self._outputs(member, self._batch(member, inputs)) for member in self.members]
        ).mean(0)
        return total.cpu().numpy()

    def overlay(self, case_input: Input, outputs: np.ndarray) -> np.ndarray:
        """A Grad-CAM picture for the highest class or label, or for the first number of a regression, from
        the first network that comes from a checkpoint; (height, width, 3) uint8."""
        member = next(member for member in self.members if member.metadata_path is None)
        target = self.image_targets.shown_output(outputs)
        image = self._batch(member, [case_input])[0]
        preprocessing, size = member.preprocessing, member.window.patch_size
        resized = preprocessing.resize is not None
        spacing_mm = case_input.crop.spacing_mm(size) if resized else preprocessing.spacing_mm
        return saliency.overlay(member.network, image, spacing_mm, target)

    def _batch(self, member: LoadedModel, inputs: Sequence[Input]) -> Tensor:
        index = self.preprocessings.index(member.preprocessing)
        return torch.from_numpy(np.stack([case_input.arrays[index] for case_input in inputs])).to(self.device)

    def _outputs(self, member: LoadedModel, images: Tensor) -> Tensor:
        axes_sets = flips(member.window.mirror_axes)

        def network(flipped: Tensor) -> Tensor:
            return member.network(flipped.contiguous(memory_format=member.memory_format))

        with autocast(member.precision, self.device):
            outputs = mean_over_flips(network, images, self.image_targets, axes_sets)
        if not outputs.isfinite().all():
            raise ValueError(f"the network's outputs are not finite (trainer.precision={member.precision})")
        return outputs


def _check_size(path: Path, member: LoadedModel, crop: CropInfo) -> None:
    """Raises: ValueError: a 2D image of another size than all training images; the network would see only its
    middle, or padding around it.
    """
    preprocessing, spacing = member.preprocessing, crop.native_spacing_mm
    alike = all(low == mm == high for mm, (low, high) in zip(spacing, member.spacing_range_mm, strict=False))
    # With several spacings, images are resampled, and scans of one native size get several sizes.
    if not member.rounding or not alike or preprocessing.frame is None:
        return
    size = resampled_shape(crop.shape[:2], spacing[:2], preprocessing.spacing_mm)
    if rounded_up(size, member.rounding) != preprocessing.frame:
        actual, expected = map(size_text, (size, preprocessing.frame))
        raise ValueError(
            f"{path}: {actual} pixels, the network was trained on images of one size and takes {expected}; "
            "resize the image, or train with data.resize"
        )
