"""Whole images through the networks, in batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medconv.data.io.grids import canonical_spacing
from medconv.data.preprocessing.preprocess import CropInfo, resampled_shape
from medconv.features.image_level.planning import MUCH_LOST
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Forward, check_finite
from medconv.inference.prepare import Input, NamedImage
from medconv.planning.topology import rounded_up
from medconv.utils.logging import size_text

# Of whole images, in one forward pass.
_MAX_VOXELS = 2**21
_MAX_IMAGES = 64


@dataclass(frozen=True)
class ImageLevelScores:
    """The networks' mean outputs for a case.

    Args:
        outputs: (names,) float32, as `ImageLevelTargets.decode` gives them.
    """

    case_input: Input
    outputs: np.ndarray

    @property
    def crop(self) -> CropInfo:
        return self.case_input.crops[0]

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return torch.from_numpy(self.outputs)

    def answer(self) -> np.ndarray:
        return self.outputs


class ImageLevelForward(Forward):
    """A batch of whole images. All members' probabilities, or numbers, give a mean.

    Args:
        batch_size: whole images in one forward pass; None: by their size.
    """

    def __init__(self, members: Sequence[LoadedModel], device: str, batch_size: int | None = None) -> None:
        super().__init__(members, device)
        largest = max(prod(member.window.patch_size) for member in members)
        fitting = max(1, min(_MAX_IMAGES, _MAX_VOXELS // largest))
        self.batch_size = batch_size or fitting

    def __call__(
        self, inputs: Sequence[Input], keeps_logits: bool = False, logit_folder: Path | None = None
    ) -> list[ImageLevelScores]:
        outputs: list[np.ndarray] = []
        for member in self.members:
            images = self.images(member, inputs)
            outputs.append(self._outputs(member, images))
        # (members, cases, names) -> (cases, names)
        means = np.stack(outputs).mean(0).astype(np.float32)
        return [ImageLevelScores(case_input, mean) for case_input, mean in zip(inputs, means, strict=True)]

    def images(self, member: LoadedModel, inputs: Sequence[Input]) -> Tensor:
        """Prepared for this network, in one batch on its device."""
        index = self.preprocessings.index(member.preprocessing)
        batch = np.stack([case_input.arrays[index] for case_input in inputs])
        return torch.from_numpy(batch).to(self.device)

    def _outputs(self, member: LoadedModel, images: Tensor) -> np.ndarray:
        assert isinstance(member.targets, ImageLevelTargets)
        outputs = mean_over_flips(member.outputs, images, member.targets, member.window.mirror_axes)
        check_finite("outputs", member, images, outputs)
        undivided = outputs.cpu().numpy()
        if member.temperature is None:
            return undivided
        return member.targets.outputs_at_temperature(undivided, member.temperature)


def mean_over_flips(
    network: Callable[[Tensor], Tensor], image: Tensor, targets: ImageLevelTargets, mirror_axes: Sequence[int]
) -> Tensor:
    """The decoded outputs, averaged over all flips along these spatial axes.

    Shape: (batch, channels, *spatial) -> (batch, names), float32.
    """
    outputs: list[Tensor] = []
    axes_sets = chain.from_iterable(
        combinations(sorted(mirror_axes), count) for count in range(len(mirror_axes) + 1)
    )
    for axes in axes_sets:
        # after the axes of batch and channels; answers have no spatial axes to flip back
        dims = [2 + axis for axis in axes]
        flipped = image.flip(dims) if dims else image
        # a copy, since a CUDA graph's next run overwrites its outputs
        outputs.append(targets.decode(network(flipped).clone()))
    return torch.stack(outputs).mean(0)


def check_prepared(
    image: NamedImage, model: LoadedModel, prepared: Sequence[int], crop: CropInfo
) -> list[str]:
    """Check the size for an image-level network, which takes images of one size.

    Returns:
        What is doubtful: that the network sees only the middle of the image.
    Raises:
        ValueError: another size; or a 2D image of another size than all training images, so that the network
            would see only its middle, or padding around it.
    """
    if tuple(prepared) != model.window.patch_size:
        raise ValueError(
            f"{image.name}: {size_text(prepared)} voxels after preprocessing, the network was trained on "
            f"images of {size_text(model.window.patch_size)}"
        )
    preprocessing = model.preprocessing
    frame = preprocessing.frame
    spacing_mm = canonical_spacing(crop.grid, crop.reoriented)
    if frame is None or preprocessing.resize is not None:
        return []
    # With several spacings, images are resampled, and scans of one native size get several sizes.
    has_training_spacing = all(
        low == mm == high for mm, (low, high) in zip(spacing_mm, model.spacing_range_mm, strict=False)
    )
    size = resampled_shape(crop.shape, spacing_mm, preprocessing.spacing_mm)[: len(frame)]
    if model.rounding and has_training_spacing and rounded_up(size, model.rounding) != frame:
        native = crop.shape[:2]
        largest = resampled_shape(frame, preprocessing.spacing_mm, spacing_mm)
        raise ValueError(
            f"{image.name}: {size_text(native)} pixels, the network was trained on images of one size and "
            f"takes up to {size_text(largest)}; resize the image, or train with resizing"
        )
    if max(1 - seen / edge for seen, edge in zip(frame, size, strict=True)) <= MUCH_LOST:
        return []
    seen_of_all = f"{size_text(frame)} of {size_text(size)} voxels"
    return [f"the network sees only its middle, {seen_of_all} on the network's grid"]
