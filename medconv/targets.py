"""What a network is asked for: classes that exclude each other, or regions that may overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """The foreground of a task, and how a network's output becomes a label map.

    Classes that exclude each other: one channel each after the background's, a softmax. Regions: one channel each, a
    sigmoid, since a voxel may lie in several.
    Args:
        names: of the foreground, in the order of the channels.
        values: the label values that each name stands for; classes have one each, 1, 2, ... in this order.
        order: of regions, the value that each writes into a label map, later ones over earlier ones; empty for classes.
        ignore: label value of voxels about which nothing is known; None where there is none.
    Source: regions as in nnU-Net v2's `regions_class_order`, Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] = ()
    ignore: int | None = None

    @classmethod
    def of_classes(cls, class_names: Sequence[str], ignore: int | None = None) -> Targets:
        """Classes that exclude each other; the names' index is the label value, the first is the background."""
        return cls(tuple(class_names[1:]), tuple((value,) for value in range(1, len(class_names))), (), ignore)

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Targets:
        """From what `plain` gave."""
        values = tuple(tuple(int(v) for v in group) for group in content["values"])
        return cls(tuple(map(str, content["names"])), values, tuple(map(int, content["order"])), content["ignore"])

    def plain(self) -> dict[str, Any]:
        """Lists, names and numbers, as YAML, JSON and checkpoints hold them."""
        values = [list(group) for group in self.values]
        return {"names": list(self.names), "values": values, "order": list(self.order), "ignore": self.ignore}

    @property
    def overlapping(self) -> bool:
        return bool(self.order)

    @property
    def num_outputs(self) -> int:
        """Channels of the network's output."""
        return len(self.names) + (not self.overlapping)

    @property
    def num_values(self) -> int:
        """A label map holds values below this, and `ignore`."""
        return 1 + max((v for group in self.values for v in group), default=0)

    def decode(self, logits: Tensor) -> Tensor:
        """The label map that logits mean; (outputs, *spatial) -> (*spatial) int16."""
        if not self.overlapping:
            return logits.argmax(0).to(torch.int16)
        label = torch.zeros(logits.shape[1:], dtype=torch.int16, device=logits.device)
        for value, region in zip(self.order, logits, strict=True):
            label[region > 0] = value
        return label

    def probabilities(self, logits: Tensor) -> Tensor:
        """Shape: (outputs, *spatial) -> the same, float32, from 0 to 1."""
        return logits.float().sigmoid() if self.overlapping else logits.float().softmax(0)
