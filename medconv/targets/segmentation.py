"""Segmentation targets: exclusive classes, or regions that may overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIGHEST = torch.iinfo(torch.int16).max  # the largest label value


@dataclass(frozen=True)
class SegmentationTargets:
    """The foreground to segment, and how a network's output becomes a label map.

    Exclusive classes: a background channel and one channel each, softmax. Regions: one channel each, sigmoid,
    because a voxel may lie in several.
    Args:
        names: of the foreground, in the order of the channels.
        values: the label values of each name; classes have one each, 1, 2, ... in this order.
        order: the value that each region writes into a label map, later over earlier; empty for classes.
        ignore: label value of unlabelled voxels; None if there is none.
    Source: regions as in nnU-Net v2's `regions_class_order`, Isensee et al. 2021,
    doi:10.1038/s41592-020-01008-z.
    """

    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] = ()
    ignore: int | None = None

    @classmethod
    def of_classes(cls, class_names: Sequence[str], ignore: int | None = None) -> SegmentationTargets:
        """Exclusive classes; the index of a name is its label value, the first is the background."""
        return cls(
            tuple(class_names[1:]), tuple((value,) for value in range(1, len(class_names))), (), ignore
        )

    @classmethod
    def from_plain(cls, content: Any) -> SegmentationTargets:
        """The inverse of `plain`; the content may be untrusted. Raises: ValueError: invalid."""
        if not isinstance(content, Mapping) or not {"names", "values", "order", "ignore"} <= set(content):
            raise ValueError("targets need names, values, order and ignore")
        names, order, ignore = names_of(content["names"]), _label_values(content["order"]), content["ignore"]
        groups = [_label_values(group) for group in _listed(content["values"])]
        if len(groups) != len(names) or not all(groups):
            raise ValueError("each name needs its label values")
        writes = order or [value for group in groups for value in group]
        if len(writes) != len(names) or len(set(writes)) < len(writes):
            raise ValueError("each name needs a label value of its own; for regions, `order` gives it")
        if any(value not in group for value, group in zip(writes, groups, strict=True)):
            raise ValueError("the label value that a region writes must be one of its values")
        if ignore is not None and _label_values([ignore])[0] in (v for group in groups for v in group):
            raise ValueError("the label value to ignore must not be a class")
        return cls(names, tuple(map(tuple, groups)), tuple(order), ignore)

    def plain(self) -> dict[str, Any]:
        """As plain types, for YAML, JSON and checkpoints."""
        values = [list(group) for group in self.values]
        return {"names": list(self.names), "values": values, "order": list(self.order), "ignore": self.ignore}

    @property
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Name to its label values."""
        return dict(zip(self.names, self.values, strict=True))

    @property
    def words(self) -> str:
        """For messages, such as `whole=1+2, core=2`."""
        return ", ".join(f"{name}={'+'.join(map(str, values))}" for name, values in self.by_name.items())

    @property
    def overlapping(self) -> bool:
        return bool(self.order)

    @property
    def num_outputs(self) -> int:
        """Channels of the network's output."""
        return len(self.names) + (not self.overlapping)

    @property
    def num_values(self) -> int:
        """Label values are below this number; `ignore` is not counted."""
        return 1 + max((v for group in self.values for v in group), default=0)

    def labelled(self, label: Tensor) -> Tensor | None:
        """Mask of the labelled voxels; None if all are. Shape: any -> same, bool."""
        return None if self.ignore is None else label != self.ignore

    def reference(self, label: Tensor) -> Tensor:
        """What the loss compares the outputs with; unlabelled voxels become background.

        Shape: label (batch, 1, *spatial) -> same; for regions (batch, regions, *spatial) of 0 and 1.
        """
        if self.overlapping:
            masks = [torch.stack([label == value for value in values]).any(0) for values in self.values]
            return torch.cat(masks, 1).float()
        return label if self.ignore is None else torch.where(label == self.ignore, 0, label)

    def decode(self, logits: Iterable[Tensor]) -> Tensor:
        """Logits to a label map.

        Shape: (outputs, *spatial), or an iterator of (*spatial) channels, so that only one needs to be in
        memory -> (*spatial) int16.
        """
        if not self.overlapping:
            return highest(logits)
        label: Tensor | None = None
        for value, region in zip(self.order, logits, strict=True):
            label = torch.zeros_like(region, dtype=torch.int16) if label is None else label
            label.masked_fill_(region > 0, value)
        assert label is not None
        return label


def names_of(content: Any) -> tuple[str, ...]:
    """Names from an untrusted file. Raises: ValueError: not a list of different names."""
    names = _listed(content)
    if not all(isinstance(name, str) and name.strip() for name in names) or len(set(names)) < len(names):
        raise ValueError(f"class names must differ from each other and not be blank, got {names!r:.200}")
    return tuple(names)


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, (list, tuple)):
        raise ValueError("expected a list")
    return list(content)


def _label_values(content: Any) -> list[int]:
    values = _listed(content)
    if not all(type(value) is int and 1 <= value <= HIGHEST for value in values):
        raise ValueError(f"label values must be whole numbers from 1 to {HIGHEST}")
    return values


def highest(channels: Iterable[Tensor]) -> Tensor:
    """The index of the highest channel, the first of equals; each (*spatial) -> (*spatial) int16.

    Equals `argmax(0)`, but holds one channel at a time and takes a fifth of the time on a CPU.
    """
    channels = iter(channels)
    best = next(channels)
    label = torch.zeros_like(best, dtype=torch.int16)
    for number, channel in enumerate(channels, start=1):
        label.masked_fill_(channel > best, number)
        best = torch.maximum(best, channel)
    return label
