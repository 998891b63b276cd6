"""What the networks give for a case, and the answers that follow: label map, probabilities, uncertainty."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medconv.data.preprocessing.preprocess import CropInfo, to_native
from medconv.inference import quality
from medconv.inference.prepare import Input
from medconv.inference.slab_answer import ContentAnswer, Group, mean_probabilities
from medconv.targets.segmentation import SegmentationTargets


@dataclass(frozen=True)
class KeptLogits:
    """All logits of a case, for its probabilities.

    Args:
        groups: one per preprocessing.
        means: the mean logits of each group, (outputs, planes, *in_plane).
    """

    groups: Sequence[Group]
    means: Sequence[Tensor]

    def on_cpu(self) -> KeptLogits:
        return replace(self, means=[logits.cpu() for logits in self.means])


@dataclass(frozen=True)
class LabelMapScores:
    """The networks' answer for a case.

    Args:
        content: label map and quality of the content.
        crop: where it lies in the image.
        targets: what the outputs mean.
        kept: all logits, if they are kept.
    """

    content: ContentAnswer
    crop: CropInfo
    targets: SegmentationTargets
    kept: KeptLogits | None = None

    @property
    def logits(self) -> list[Tensor]:
        """Per preprocessing the mean over members, (outputs, *spatial); they must have been kept."""
        assert self.kept is not None
        pairs = zip(self.kept.means, self.kept.groups, strict=True)
        return [mean.movedim(1, 1 + group.grid.axis) for mean, group in pairs]

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return self.logits[0]

    def answer(self) -> np.ndarray:
        """The label map on the image's own grid, (X, Y, Z) int16; outside the crop it is background."""
        return to_native(self.content.label, self.crop)

    def uncertainty(self) -> np.ndarray:
        """As `quality.uncertainty`, on the image's own grid, (X, Y, Z) float32; 0 outside the crop."""
        assert self.content.uncertainty is not None
        return to_native(self.content.uncertainty, self.crop)

    def agreement(self) -> dict[str, Any]:
        """As `quality.agreement`, between the members."""
        return quality.agreement(self.content.source_labels, self.targets, self.crop.grid.voxel_mm3)

    @torch.inference_mode()
    def probabilities(self) -> Iterator[np.ndarray]:
        """One channel after the other, each (X, Y, Z) float32; the logits must have been kept.

        The channels are background and classes, which add up to 1, or regions. Outside the crop all is
        background.
        """
        assert self.kept is not None
        whole_slabs = [group.grid.whole for group in self.kept.groups]
        means = mean_probabilities(self.kept.groups, whole_slabs, self.kept.means, self.targets)
        for index, planes in enumerate(means):
            content = planes.movedim(0, self.kept.groups[0].grid.axis)
            is_background = index == 0 and self.targets.exclusive
            yield to_native(content.cpu().numpy(), self.crop, outside=float(is_background))

    def on_cpu(self) -> LabelMapScores:
        return replace(self, kept=self.kept and self.kept.on_cpu())


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
