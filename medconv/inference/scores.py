"""What the networks give for a case, and the answers that follow: label map, probabilities, uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from medconv.data.preprocessing.preprocess import CropInfo, on_content_grid, to_native
from medconv.inference import quality
from medconv.inference.prepare import Input
from medconv.targets.segmentation import SegmentationTargets

Result = TypeVar("Result")


@dataclass(frozen=True)
class LabelMapScores:
    """The networks' logits for a case.

    Args:
        logits: (outputs, *spatial) per preprocessing: the mean over the members that share it.
        weights: per preprocessing, its share of the members.
        crops: per preprocessing, where its logits lie in the image.
        targets: what the outputs mean.
        member_labels: the label map of each member on the content's grid, (R, A, S), if they are kept.
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
        """What two networks are compared by."""
        return self.logits[0]

    @torch.inference_mode()
    def answer(self) -> np.ndarray:
        """The label map on the image's own grid, (X, Y, Z) int16.

        With one preprocessing, it is the same as `restore` gives in validation.
        """
        label = with_cpu_fallback(self, LabelMapScores.content_label)
        return to_native(label, self.crop)

    def content_label(self) -> np.ndarray:
        """The label map of the content, in canonical axes: (R, A, S) int16."""
        if len(self.logits) == 1:
            label = self.targets.decode(on_content_grid(self.logits[0], self.crop))
        else:
            label = self.targets.decode_mean(self._mean_probabilities())
        return label.cpu().numpy()

    @torch.inference_mode()
    def probabilities(self) -> Iterator[np.ndarray]:
        """One channel after the other, each (X, Y, Z) float32.

        The channels are background and classes, which add up to 1, or regions. Outside the crop all is
        background.
        """
        for index, channel in enumerate(self._mean_probabilities()):
            is_background = index == 0 and self.targets.exclusive
            yield to_native(channel.cpu().numpy(), self.crop, outside=float(is_background))

    @torch.inference_mode()
    def uncertainty(self) -> np.ndarray:
        """As `quality.uncertainty`, on the image's own grid, (X, Y, Z) float32; 0 outside the crop."""
        entropy = quality.uncertainty(
            self._mean_probabilities(),
            self.targets.num_outputs,
            self.targets.exclusive,
        )
        return to_native(entropy.cpu().numpy(), self.crop)

    def agreement(self) -> dict[str, Any]:
        """As `quality.agreement`, between the members."""
        return quality.agreement(self.member_labels, self.targets, self.crop.grid.voxel_mm3)

    def on_cpu(self) -> LabelMapScores:
        return replace(self, logits=[logits.cpu() for logits in self.logits])

    def _mean_probabilities(self) -> Iterator[Tensor]:
        """The weighted mean over preprocessings, channel by channel, each (R, A, S)."""
        pairs = zip(self.logits, self.crops, strict=True)
        probabilities = [self._probabilities(logits, crop) for logits, crop in pairs]
        for channels in zip(*probabilities, strict=True):
            mean = torch.zeros_like(channels[0])
            for weight, channel in zip(self.weights, channels, strict=True):
                mean = mean + weight * channel
            yield mean

    def _probabilities(self, logits: Tensor, crop: CropInfo) -> Iterator[Tensor]:
        """Channel by channel, so that not all of them are in memory on the native grid."""
        # Two passes over the channels: a softmax needs the sum before the first probability.
        first_pass = on_content_grid(logits, crop)
        second_pass = on_content_grid(logits, crop)
        yield from self.targets.probabilities(first_pass, second_pass)


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
        return self.case_input.crop

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return torch.from_numpy(self.outputs)

    def answer(self) -> np.ndarray:
        return self.outputs


def with_cpu_fallback(
    scores: LabelMapScores,
    compute: Callable[[LabelMapScores], Result],
) -> Result:
    """`compute(scores)`, on the CPU if the GPU runs out of memory."""
    try:
        return compute(scores)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return compute(scores.on_cpu())
