"""Prepared images through the networks: a volume by sliding windows, or a batch of whole images at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from medconv.data.case import Case
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, on_content_grid, to_native
from medconv.inference import quality, saliency
from medconv.inference.load import LoadedModel
from medconv.inference.tta import flips, mean_over_flips
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.hardware import autocast_dtype

_MAX_VOXELS = 2**21  # of all whole images in one forward pass
_MAX_IMAGES = 64  # in one forward pass
Result = TypeVar("Result")
_FAR_VALUE = 1e4  # of a prepared image; float16 ends at 65504


@dataclass(frozen=True)
class Input:
    """A case as the networks take it.

    Args: arrays, crops: one per preprocessing; crops are alike but for `nearest_axis`. warning: unusual
        properties.
    """

    case: Case
    arrays: list[np.ndarray]
    crops: list[CropInfo]
    warning: str | None = None

    @property
    def crop(self) -> CropInfo:
        return self.crops[0]


@dataclass(frozen=True)
class LabelMapScores:
    """The networks' outputs for a case.

    Args:
        logits: (outputs, *spatial) per preprocessing: the mean over the members that share it.
        weights: per preprocessing, its share of the members. crops: as of `Input`.
        member_labels: of each member the label map of the content, (R, A, S), if they are kept.
    """

    logits: list[Tensor]
    weights: list[float]
    crops: list[CropInfo]
    targets: SegmentationTargets
    member_labels: tuple[np.ndarray, ...] = ()

    @property
    def crop(self) -> CropInfo:
        return self.crops[0]

    @property
    def values(self) -> Tensor:
        """What networks are compared by."""
        return self.logits[0]

    @torch.inference_mode()
    def answer(self) -> np.ndarray:
        """The label map on the image's own grid, (X, Y, Z) int16; with one preprocessing, the same as
        `restore` in validation.
        """
        return with_cpu_fallback(self, LabelMapScores._label)

    @torch.inference_mode()
    def probabilities(self) -> Iterator[np.ndarray]:
        """One channel after the other, each (X, Y, Z) float32: background and classes, which add up to 1, or
        regions. Outside the crop all is background."""
        for number, channel in enumerate(self._mean()):
            outside = float(number == 0 and self.targets.exclusive)
            yield to_native(channel.cpu().numpy(), self.crop, outside)

    @torch.inference_mode()
    def uncertainty(self) -> np.ndarray:
        """As `quality.uncertainty`, on the image's own grid, (X, Y, Z) float32; 0 outside the crop."""
        values = quality.uncertainty(self._mean(), self.targets.num_outputs, self.targets.exclusive)
        return to_native(values.cpu().numpy(), self.crop)

    def agreement(self) -> dict[str, Any]:
        """As `quality.agreement`, between the members."""
        return quality.agreement(self.member_labels, self.targets, self.crop.grid.voxel_mm3)

    def on_cpu(self) -> LabelMapScores:
        return replace(self, logits=[logits.cpu() for logits in self.logits])

    def content_label(self) -> np.ndarray:
        """The label map of the content, in canonical axes: (R, A, S) int16."""
        if len(self.logits) == 1:
            values = self.targets.decode(on_content_grid(self.logits[0], self.crop))
        else:
            values = self.targets.decode_mean(self._mean())
        return values.cpu().numpy()

    def _label(self) -> np.ndarray:
        return to_native(self.content_label(), self.crop)

    def _mean(self) -> Iterator[Tensor]:
        for channels in zip(*map(self._each_probability, self.logits, self.crops), strict=True):
            yield sum(
                (w * p for w, p in zip(self.weights, channels, strict=True)), torch.zeros_like(channels[0])
            )

    def _each_probability(self, logits: Tensor, crop: CropInfo) -> Iterator[Tensor]:
        """Channel by channel, so that not all of them are in memory on the native grid."""
        channels, again = (on_content_grid(logits, crop) for _ in range(2))
        yield from self.targets.probabilities(channels, again)


@dataclass(frozen=True)
class ImageLevelScores:
    """The networks' mean outputs for a case. Args: outputs: (names,), as `ImageLevelTargets.decode` gives
    them.
    """

    case_input: Input
    outputs: np.ndarray

    @property
    def crop(self) -> CropInfo:
        return self.case_input.crop

    @property
    def values(self) -> Tensor:
        """What networks are compared by."""
        return torch.from_numpy(self.outputs)

    def answer(self) -> np.ndarray:
        return self.outputs


class Forward(ABC):
    """Networks of the same targets, which give a mean.

    Args: batch_size: cases in one call.
    """

    batch_size: int = 1

    def __init__(self, members: Sequence[LoadedModel], device: str) -> None:
        self.members, self.device = tuple(members), device
        self.preprocessings: list[PreprocessingConfig] = []
        for member in self.members:
            if member.preprocessing not in self.preprocessings:
                self.preprocessings.append(member.preprocessing)

    @abstractmethod
    def __call__(self, inputs: Sequence[Input]) -> Sequence[Any]:
        """The scores of each case. Raises: ValueError: the networks' outputs are not finite."""


class LabelMapForward(Forward):
    """Sliding windows. Members with the same preprocessing give the mean of their logits.

    Args: keeps_labels: each member's own label map is kept, too.
    """

    def __init__(self, members: Sequence[LoadedModel], device: str, keeps_labels: bool = False) -> None:
        super().__init__(members, device)
        self.keeps_labels = keeps_labels

    def __call__(self, inputs: Sequence[Input]) -> list[LabelMapScores]:
        return [self._scores(case_input) for case_input in inputs]

    def _scores(self, case_input: Input) -> LabelMapScores:
        logits, weights, labels = [], [], list[np.ndarray]()
        targets, crops = self.members[0].targets, case_input.crops
        assert isinstance(targets, SegmentationTargets)

        def keep(crop: CropInfo, member_logits: Tensor) -> None:
            if self.keeps_labels:
                scores = LabelMapScores([member_logits], [1.0], [crop], targets)
                labels.append(with_cpu_fallback(scores, LabelMapScores.content_label))

        for preprocessing, array, crop in zip(self.preprocessings, case_input.arrays, crops, strict=True):
            sharing = [member for member in self.members if member.preprocessing == preprocessing]
            image = torch.from_numpy(array)[None].to(self.device)
            logits.append(self._mean(sharing, image, partial(keep, crop)))
            weights.append(len(sharing) / len(self.members))
            _check_finite(finite(logits[-1]), "logits", sharing[0], array)
        if len({each.device for each in logits}) > 1:  # not all fit into the GPU's memory
            logits = [each.cpu() for each in logits]
        return LabelMapScores(logits, weights, crops, targets, tuple(labels))

    def _mean(self, members: Sequence[LoadedModel], image: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        total = self._logits(members[0], image)
        keep(total)
        for member in members[1:]:
            other = self._logits(member, image)
            keep(other)
            total = total.to(other.device).add_(other)
            del other
        return total.div_(len(members)) if len(members) > 1 else total

    def _logits(self, member: LoadedModel, image: Tensor) -> Tensor:
        with autocast(member.precision, self.device):
            return member.window(_network(member), image)[0].float()


class ImageLevelForward(Forward):
    """A batch of whole images. All members' probabilities, or numbers, give a mean.

    Args: batch_size: None: by the images' size.
    """

    def __init__(self, members: Sequence[LoadedModel], device: str, batch_size: int | None = None) -> None:
        super().__init__(members, device)
        largest = max(prod(member.window.patch_size) for member in members)
        self.batch_size = batch_size or max(1, min(_MAX_IMAGES, _MAX_VOXELS // largest))

    def __call__(self, inputs: Sequence[Input]) -> list[ImageLevelScores]:
        outputs = [self._outputs(member, self._images(member, inputs)) for member in self.members]
        mean = torch.stack(outputs).mean(0).cpu().numpy()
        return [ImageLevelScores(*pair) for pair in zip(inputs, mean, strict=True)]

    def overlay(self, scores: ImageLevelScores) -> np.ndarray:
        """A Grad-CAM picture for the highest class or label, or for the first number of a regression, from
        the first network that comes from a checkpoint; (height, width, 3) uint8."""
        member = next(member for member in self.members if member.metadata_path is None)
        assert isinstance(member.targets, ImageLevelTargets)
        target = member.targets.shown_output(scores.outputs)
        image = self._images(member, [scores.case_input])[0]
        preprocessing, size = member.preprocessing, member.window.patch_size
        resized = preprocessing.resize is not None
        spacing_mm = scores.crop.spacing_mm(size) if resized else preprocessing.spacing_mm
        return saliency.overlay(member.network, image, spacing_mm, target)

    def _images(self, member: LoadedModel, inputs: Sequence[Input]) -> Tensor:
        index = self.preprocessings.index(member.preprocessing)
        return torch.from_numpy(np.stack([case_input.arrays[index] for case_input in inputs])).to(self.device)

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
    return bool(torch.stack([channel.isfinite().all() for channel in logits]).all())


def with_cpu_fallback(scores: LabelMapScores, work: Callable[[LabelMapScores], Result]) -> Result:
    """`work(scores)`, on the CPU if the GPU runs out of memory."""
    try:
        return work(scores)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return work(scores.on_cpu())


def _network(member: LoadedModel) -> Callable[[Tensor], Any]:
    return lambda images: member.network(images.contiguous(memory_format=member.memory_format))


def _check_finite(is_finite: bool, what: str, member: LoadedModel, images: np.ndarray | Tensor) -> None:
    """Raises: ValueError: not finite; it blames the images where they are far from what a network is fed."""
    if is_finite:
        return
    low, high = float(images.min()), float(images.max())
    cause = f"the network's {what} are not finite (trainer.precision={member.precision})"
    if max(-low, high) > _FAR_VALUE:
        by = "/".join(dict.fromkeys(member.preprocessing.normalisation))
        cause = f"the image has values from {low:.4g} to {high:.4g} after data.normalisation={by}; {cause}"
    raise ValueError(cause)
