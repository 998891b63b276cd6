"""Logits and label maps to compute losses of."""

import torch
from torch import Tensor

from medconv.targets.segmentation import SegmentationTargets


def target_example(
    targets: SegmentationTargets, shape: tuple[int, ...] = (2, 5, 6), seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits, and a label map with every value; a third of it is ignored, if the targets allow that."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape[0], targets.num_outputs, *shape[1:], generator=draw)
    label = torch.randint(3, (shape[0], 1, *shape[1:]), generator=draw, dtype=torch.uint8)
    if targets.ignore is not None:
        label[torch.rand(label.shape, generator=draw) < 0.3] = targets.ignore
    return logits, label
