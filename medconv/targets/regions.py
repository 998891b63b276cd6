"""Regions of label values, which may overlap."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.targets.base import label_values
from medconv.targets.segmentation import ABSENT, SegmentationTargets, over_voxels


@dataclass(frozen=True)
class RegionTargets(SegmentationTargets):
    """Regions that may overlap: one channel each, sigmoid, because a voxel may lie in several.

    Args:
        order: the label value that each region writes into a label map, later over earlier.
    Source: as in nnU-Net v2's `regions_class_order`, Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    kind: ClassVar[str] = "regions"
    exclusive: ClassVar[bool] = False
    output_meaning: ClassVar[str] = (
        "a sigmoid for each channel; a region is where its logit is above 0; `order` gives the label value "
        "that each region writes, later ones over earlier ones, the rest is 0"
    )
    order: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, content: Mapping[str, Any], **_: Any) -> Self:
        return super().from_fields(content, order=tuple(label_values(content.get("order"))))

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "order": list(self.order)}

    @property
    def description(self) -> str:
        return f"{super().description}, in order {list(self.order)}"

    @property
    def written(self) -> tuple[int, ...]:
        return self.order

    def distinguishes(self, first_value: int, second_value: int) -> bool:
        return any((first_value in values) != (second_value in values) for values in self.values)

    @property
    def num_outputs(self) -> int:
        return len(self.names)

    def reference(self, label: Tensor) -> Tensor:
        masks = []
        for values in self.values:
            value_masks = torch.stack([label == value for value in values])
            masks.append(value_masks.any(0))
        return torch.cat(masks, 1).float()

    def annotated_outputs(self, values: Collection[int]) -> tuple[bool, ...]:
        return tuple(all(value in values for value in group) for group in self.values)

    def marginal(self, outputs: Tensor, reference: Tensor, annotated: Tensor) -> tuple[Tensor, Tensor]:
        is_annotated = over_voxels(annotated, outputs)
        outputs = torch.where(is_annotated, outputs, ABSENT)
        reference = torch.where(is_annotated, reference, 0)
        return outputs, reference

    def decode(self, logits: Iterable[Tensor]) -> Tensor:
        label: Tensor | None = None
        # one region at a time: not all of them need to be in memory
        for value, region in zip(self.order, logits, strict=True):
            if label is None:
                label = torch.zeros_like(region, dtype=torch.int16)
            # a logit above 0 is a probability above one half
            label.masked_fill_(region > 0, value)
        assert label is not None
        return label

    def decode_mean(self, probabilities: Iterable[Tensor]) -> Tensor:
        """A region is where its probability is above one half, and `decode` looks above 0."""
        return self.decode(channel - 0.5 for channel in probabilities)

    def log_total(self, channels: Iterable[Tensor]) -> None:
        return None

    def probability(self, logits: Tensor, log_total: Tensor | None) -> Tensor:
        return logits.sigmoid()

    def _entropy(self, logits: Tensor, reference: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, reference.float())
