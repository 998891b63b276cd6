"""From the files of cases to what networks say of whole images: probabilities of classes or findings, or
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

_VOXELS = 2**21  # in one forward pass, of all its images
_MOST = 64  # images in one


class ImagePredictor(Predictor):
    """One network that was trained on whole images, or several: the mean of their probabilities, or of their
    numbers.

    Members may be prepared for in different ways. Args: as of `Predictor`. batch_size: images in one forward
    pass; None: by their size. Raises: ValueError: members that were not trained for the same.
    """

    def __init__(
        self, members: Sequence[LoadedModel], device: str = "cpu", batch_size: int | None = None
    ) -> None:
        super().__init__(members, device)
        assert self.members[0].image_targets is not None
        self.image_targets: ImageLevelTargets = self.members[0].image_targets
        largest = max(prod(member.window.patch_size) for member in self.members)
        self.batch_size = batch_size or max(1, min(_MOST, _VOXELS // largest))

    def answer(self, *images: Path | str) -> np.ndarray:
        """Of a case, (outputs,), from its files: one per channel, or one with all of them. Raises:
        ValueError: as `read`.
        """
        paths = tuple(Path(path) for path in images)
        return self.answers([self.read(Case(paths[0].name, paths))])[0]

    def read(self, case: Case) -> Input:
        """Raises: ValueError: its files are at fault, or do not fit the network."""
        given = super().read(case)
        for member in self.members:
            size = given.arrays[self.recipes.index(member.recipe)].shape[1:]
            if tuple(size) != member.window.patch_size:
                here, there = (" x ".join(map(str, shape)) for shape in (size, member.window.patch_size))
                raise ValueError(
                    f"{case.images[0]}: {here} voxels as the network sees it, which was trained on images of "
                    f"{there}"
                )
            _need_size(case.images[0], member, given.placement)
        return given

    @torch.inference_mode()
    def answers(self, given: Sequence[Input]) -> np.ndarray:
        """(cases, outputs), as `ImageLevelTargets.decode` gives them. Raises: ValueError: the network's
        numbers are not finite.
        """
        total = torch.stack(
            [self._of_one(member, self._batch(member, given)) for member in self.members]
        ).mean(0)
        return total.cpu().numpy()

    def overlay(self, given: Input, answer: np.ndarray) -> np.ndarray:
        """What speaks for the highest class or finding, or for a larger first number, in the first network
        that is no exported file; (height, width, 3) uint8."""
        member = next(member for member in self.members if member.card is None)
        target = 0 if self.image_targets.kind == "regression" else int(answer.argmax())
        image = self._batch(member, [given])[0]
        recipe, size = member.recipe, member.window.patch_size
        spacing_mm = recipe.spacing_mm if recipe.resize is None else given.placement.spacing_mm(size)
        return saliency.overlay(member.network, image, spacing_mm, target)

    def _batch(self, member: LoadedModel, given: Sequence[Input]) -> Tensor:
        index = self.recipes.index(member.recipe)
        return torch.from_numpy(np.stack([one.arrays[index] for one in given])).to(self.device)

    def _of_one(self, member: LoadedModel, image: Tensor) -> Tensor:
        over = flips(member.window.mirror_axes)

        def network(flipped: Tensor) -> Tensor:
            return member.network(flipped.contiguous(memory_format=member.memory_format))

        with autocast(member.precision, self.device):
            found = mean_over_flips(network, image, self.image_targets, over)
        if not found.isfinite().all():
            raise ValueError(f"the network's outputs are not finite (trainer.precision={member.precision})")
        return found


def _need_size(path: Path, member: LoadedModel, placement: CropInfo) -> None:
    """Raises: ValueError: a picture of another size than all of training, of which the network would see
    the middle.
    """
    recipe, spacing = member.recipe, placement.native_spacing_mm
    alike = all(low == mm == high for mm, (low, high) in zip(spacing, member.spacing_range_mm, strict=False))
    if not member.rounding or not alike or recipe.frame is None:  # resampled, scans of one size have several
        return
    size = resampled_shape(placement.shape[:2], spacing[:2], recipe.spacing_mm)
    if rounded_up(size, member.rounding) != recipe.frame:
        here, there = (" x ".join(map(str, shape)) for shape in (size, recipe.frame))
        raise ValueError(
            f"{path}: {here} pixels, the network was trained on pictures of one size and takes {there}; "
            "expected such, or a network that was trained with data.resize"
        )
