"""What the networks give for a case, and the answers that follow: label map and probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from medconv.data.preprocessing.preprocess import ContentArray, CropInfo, to_native
from medconv.inference.logit_file import LogitFile
from medconv.inference.logit_stream import WholeLogits
from medconv.inference.slab_answer import MeanProbabilities, SlabAnswer, WeightedGrid
from medconv.targets.segmentation import SegmentationTargets


@dataclass(frozen=True)
class KeptLogits:
    """All logits of a case, for its probabilities.

    Args:
        grids: one per preprocessing.
        means: the mean logits of each, in memory or in a file.
    """

    grids: Sequence[WeightedGrid]
    means: Sequence[WholeLogits | LogitFile]


@dataclass(frozen=True)
class LabelMapScores:
    """The networks' answer for a case.

    Args:
        label: of the content, in canonical axes, (R, A, S) uint8 or int16.
        crop: where the content lies in the image.
        targets: what the outputs mean.
        answers: what else follows from the logits, by the flag of the `Extra` that asked for it.
        kept: all logits, if they are kept.
    """

    label: np.ndarray
    crop: CropInfo
    targets: SegmentationTargets
    answers: Mapping[str, SlabAnswer] = field(default_factory=dict)
    kept: KeptLogits | None = None

    @property
    def logits(self) -> list[Tensor]:
        """Per preprocessing the mean over members, (outputs, *spatial); they must be in memory."""
        assert self.kept is not None
        all_logits: list[Tensor] = []
        for mean, weighted in zip(self.kept.means, self.kept.grids, strict=True):
            assert isinstance(mean, WholeLogits)
            all_logits.append(mean.logits.movedim(1, 1 + weighted.grid.axis))
        return all_logits

    @property
    def values(self) -> Tensor:
        """What two networks are compared by."""
        return self.logits[0]

    def answer(self) -> np.ndarray:
        """The label map on the image's own grid, (X, Y, Z) int16; outside the crop it is background."""
        return to_native(self.label, self.crop).astype(np.int16)

    @torch.inference_mode()
    def probabilities(self) -> Iterator[np.ndarray]:
        """One channel after the other, each (X, Y, Z) float32; the logits must have been kept.

        The channels are background and classes, which add up to 1, or regions. Outside the crop all is
        background. In memory are one channel and, for classes, the sum over all of them.
        """
        assert self.kept is not None
        grids = self.kept.grids
        slabs_of_grids = list(zip(*(weighted.grid.slabs() for weighted in grids), strict=True))
        means: list[MeanProbabilities] = []
        for slabs in slabs_of_grids:
            pairs = zip(self.kept.means, slabs, strict=True)
            logits = [mean.channels(slab.sources) for mean, slab in pairs]
            means.append(MeanProbabilities(grids, slabs, logits, self.targets))
        for index in range(self.targets.num_outputs):
            content = ContentArray(grids[0].grid, np.float32)
            for slabs, mean in zip(slabs_of_grids, means, strict=True):
                content.put(slabs[0], mean.channel(index).cpu().numpy())
            is_background = index == 0 and self.targets.exclusive
            yield to_native(content.array, self.crop, outside=float(is_background))
