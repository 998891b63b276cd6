"""Label maps of classes that exclude each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.targets.segmentation import ABSENT, SegmentationTargets, over_voxels


@dataclass(frozen=True)
class LabelMapTargets(SegmentationTargets):
    """Exclusive classes: a background channel and one channel per class, softmax.

    Args:
        values: one per class: 1, 2, ... in this order.
    """

    kind: ClassVar[str] = "label_map"
    exclusive: ClassVar[bool] = True
    can_swap_labels: ClassVar[bool] = True
    output_meaning: ClassVar[str] = (
        "softmax over the channels; a voxel's label is the number of the highest channel, the first of "
        "several"
    )

    @classmethod
    def of_classes(cls, class_names: Sequence[str], ignore: int | None = None) -> LabelMapTargets:
        """The index of a name is its label value, the first is the background."""
        names = tuple(class_names[1:])
        values = tuple((value,) for value in range(1, len(class_names)))
        return cls(names, values, ignore)

    @property
    def written(self) -> tuple[int, ...]:
        return tuple(value for group in self.values for value in group)

    @property
    def num_outputs(self) -> int:
        return len(self.names) + 1

    def reference(self, label: Tensor) -> Tensor:
        if self.ignore is None:
            return label
        return torch.where(label == self.ignore, 0, label)

    def annotated_outputs(self, values: Collection[int]) -> tuple[bool, ...]:
        return (True, *(value in values for value in self.written))

    def marginal(self, outputs: Tensor, reference: Tensor, annotated: Tensor) -> tuple[Tensor, Tensor]:
        # the background's logit stands for all classes that nobody annotated in this case
        merged = self._merged(outputs, annotated)
        # voxels of a class that is not annotated become background
        voxel_outputs = reference.flatten(1).long()  # the output of a voxel's class is its label value
        voxel_is_annotated = annotated.gather(1, voxel_outputs).view_as(reference)
        return merged, torch.where(voxel_is_annotated, reference, 0)

    @staticmethod
    def _merged(outputs: Tensor, annotated: Tensor) -> Tensor:
        """Logits whose background has the probability of all classes that are not annotated."""
        is_annotated_class = over_voxels(annotated, outputs)[:, 1:]
        outputs = outputs.float()
        background = outputs[:, :1]
        classes = outputs[:, 1:]
        # the sum of probabilities is `logsumexp` of logits: background with all classes not annotated
        not_annotated = torch.where(is_annotated_class, ABSENT, classes)
        merged_background = torch.cat([background, not_annotated], 1).logsumexp(1, keepdim=True)
        remaining_classes = torch.where(is_annotated_class, classes, ABSENT)
        return torch.cat([merged_background, remaining_classes], 1)

    def decode(self, logits: Iterable[Tensor]) -> Tensor:
        """The index of the highest channel, the first of equals.

        Equals `argmax(0)`, but holds one channel at a time and takes a fifth of the time on a CPU.
        """
        channels = iter(logits)
        highest = next(channels)
        label = torch.zeros_like(highest, dtype=torch.int16)
        for index, channel in enumerate(channels, start=1):
            label.masked_fill_(channel > highest, index)
            highest = torch.maximum(highest, channel)
        return label

    def decode_mean(self, probabilities: Iterable[Tensor]) -> Tensor:
        return self.decode(probabilities)

    def log_total(self, channels: Iterable[Tensor]) -> Tensor:
        # one channel at a time: all logits of a CT may not fit into memory as floats
        return reduce(torch.logaddexp, channels)

    def probability(self, logits: Tensor, log_total: Tensor | None) -> Tensor:
        assert log_total is not None
        return (logits - log_total).exp_()

    def _entropy(self, logits: Tensor, reference: Tensor) -> Tensor:
        # CUDA has no deterministic kernel for the mean of images
        voxel_losses = F.cross_entropy(logits, reference[:, 0].long(), reduction="none")
        return voxel_losses.mean()
