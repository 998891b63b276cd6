"""Prepared images through the networks: a volume by sliding windows, or a batch of whole images at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig
from medconv.inference import saliency
from medconv.inference.load import LoadedModel
from medconv.inference.prepare import Input
from medconv.inference.scores import ImageLevelScores, LabelMapScores, with_cpu_fallback
from medconv.inference.tta import flips, mean_over_flips
from medconv.performance.switches import to_memory_format
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.hardware import autocast_dtype

# Of whole images, in one forward pass.
_MAX_VOXELS = 2**21
_MAX_IMAGES = 64
# Of a prepared image; float16 ends at 65504.
_FAR_VALUE = 1e4


class Forward(ABC):
    """Networks of the same targets, which give a mean.

    Args:
        members: the networks.
        device: where they run, as torch names it.
        batch_size: cases in one call.
    """

    batch_size: int = 1

    def __init__(self, members: Sequence[LoadedModel], device: str) -> None:
        self.members = tuple(members)
        self.device = device
        self.preprocessings: list[PreprocessingConfig] = []
        for member in self.members:
            if member.preprocessing not in self.preprocessings:
                self.preprocessings.append(member.preprocessing)

    @abstractmethod
    def __call__(self, inputs: Sequence[Input]) -> Sequence[Any]:
        """The scores of each case. Raises: ValueError: the networks' outputs are not finite."""


class LabelMapForward(Forward):
    """Sliding windows. Members with the same preprocessing give the mean of their logits.

    Args:
        keeps_labels: each member's own label map is kept, too.
    """

    def __init__(
        self,
        members: Sequence[LoadedModel],
        device: str,
        keeps_labels: bool = False,
    ) -> None:
        super().__init__(members, device)
        self.keeps_labels = keeps_labels

    def __call__(self, inputs: Sequence[Input]) -> list[LabelMapScores]:
        return [self._scores(case_input) for case_input in inputs]

    def _scores(self, case_input: Input) -> LabelMapScores:
        targets = self.members[0].targets
        assert isinstance(targets, SegmentationTargets)
        logits: list[Tensor] = []
        weights: list[float] = []
        member_labels: list[np.ndarray] = []
        prepared = zip(self.preprocessings, case_input.arrays, case_input.crops, strict=True)
        for preprocessing, array, crop in prepared:
            sharing = [member for member in self.members if member.preprocessing == preprocessing]
            mean, labels = self._mean_logits(sharing, array, crop, targets)
            _check_finite(finite(mean), "logits", sharing[0], array)
            logits.append(mean)
            weights.append(len(sharing) / len(self.members))
            member_labels += labels
        # Not all fit into the GPU's memory.
        if len({each.device for each in logits}) > 1:
            logits = [each.cpu() for each in logits]
        return LabelMapScores(
            logits=logits,
            weights=weights,
            crops=case_input.crops,
            targets=targets,
            member_labels=tuple(member_labels),
        )

    def _mean_logits(
        self,
        members: Sequence[LoadedModel],
        array: np.ndarray,
        crop: CropInfo,
        targets: SegmentationTargets,
    ) -> tuple[Tensor, list[np.ndarray]]:
        """The mean over members of the same preprocessing, and each member's label map if they are kept."""
        image = torch.from_numpy(array)[None].to(self.device)
        member_labels: list[np.ndarray] = []
        total: Tensor | None = None
        for member in members:
            with autocast(member.precision, self.device):
                logits = member.window(_network(member), image)[0].float()
            if self.keeps_labels:
                scores = LabelMapScores([logits], [1.0], [crop], targets)
                member_labels.append(with_cpu_fallback(scores, LabelMapScores.content_label))
            # Where one member's logits did not fit into GPU memory, the sum goes to the CPU, too.
            total = logits if total is None else total.to(logits.device).add_(logits)
            # Else they stay in memory beside the next member's.
            del logits
        assert total is not None
        if len(members) > 1:
            total.div_(len(members))
        return total, member_labels


class ImageLevelForward(Forward):
    """A batch of whole images. All members' probabilities, or numbers, give a mean.

    Args:
        batch_size: whole images in one forward pass; None: by their size.
    """

    def __init__(
        self,
        members: Sequence[LoadedModel],
        device: str,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(members, device)
        largest = max(prod(member.window.patch_size) for member in members)
        fitting = max(1, min(_MAX_IMAGES, _MAX_VOXELS // largest))
        self.batch_size = batch_size or fitting

    def __call__(self, inputs: Sequence[Input]) -> list[ImageLevelScores]:
        outputs: list[Tensor] = []
        for member in self.members:
            images = self._images(member, inputs)
            outputs.append(self._outputs(member, images))
        # (members, cases, names) -> (cases, names)
        means = torch.stack(outputs).mean(0).cpu().numpy()
        return [ImageLevelScores(case_input, mean) for case_input, mean in zip(inputs, means, strict=True)]

    def overlay(self, scores: ImageLevelScores) -> np.ndarray:
        """A Grad-CAM picture from the first network.

        It is for the highest class or label, or for the first number of a regression.
        Shape: (height, width, 3) uint8.
        """
        member = self.members[0]
        assert isinstance(member.targets, ImageLevelTargets)
        target = member.targets.shown_output(scores.outputs)
        image = self._images(member, [scores.case_input])[0]
        spacing_mm = member.preprocessing.spacing_mm
        if member.preprocessing.resize is not None:
            spacing_mm = scores.crop.spacing_mm(member.window.patch_size)
        return saliency.overlay(member.network, image, spacing_mm, target)

    def _images(self, member: LoadedModel, inputs: Sequence[Input]) -> Tensor:
        index = self.preprocessings.index(member.preprocessing)
        batch = np.stack([case_input.arrays[index] for case_input in inputs])
        return torch.from_numpy(batch).to(self.device)

    def _outputs(self, member: LoadedModel, images: Tensor) -> Tensor:
        assert isinstance(member.targets, ImageLevelTargets)
        axes_sets = flips(member.window.mirror_axes)
        with autocast(member.precision, self.device):
            outputs = mean_over_flips(_network(member), images, member.targets, axes_sets)
        _check_finite(bool(outputs.isfinite().all()), "outputs", member, images)
        return outputs


def autocast(precision: str, device: str) -> torch.autocast:
    """The autocast that Lightning uses for this `trainer.precision`."""
    dtype = autocast_dtype(precision)
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)


def finite(logits: Tensor) -> bool:
    """Whether all logits are finite; tested channel by channel, since the test copies its input."""
    # One transfer from the GPU, not one per channel.
    per_channel = [channel.isfinite().all() for channel in logits]
    return bool(torch.stack(per_channel).all())


def _network(member: LoadedModel) -> Callable[[Tensor], Any]:
    return lambda images: member.network(to_memory_format(images, member.memory_format))


def _check_finite(
    is_finite: bool,
    kind: str,
    member: LoadedModel,
    images: np.ndarray | Tensor,
) -> None:
    """Raises: ValueError: not finite; it blames the images where they are far from what a network is fed."""
    if is_finite:
        return
    cause = f"the network's {kind} are not finite (precision={member.precision})"
    low = float(images.min())
    high = float(images.max())
    if max(-low, high) > _FAR_VALUE:
        by = "/".join(dict.fromkeys(member.preprocessing.normalisation))
        cause = f"the image has values from {low:.4g} to {high:.4g} after normalisation={by}; {cause}"
    raise ValueError(cause)
