"""Cross-entropy and Dice with a further term about the shape of the foreground."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from medconv.training.losses.segmentation import DiceCrossEntropy, foreground


class ShapeTermLoss(nn.Module, ABC):
    """`DiceCrossEntropy` plus `weight` times the `term` of a subclass, which looks at neighbouring voxels.

    Shape: as of `DiceCrossEntropy`. Voxels without a label are background to the term, in the prediction and
    in the reference, and have a gradient of 0.

    Args:
        weight: of the term.
        dice_weight, ce_weight: as of `DiceCrossEntropy`.
    Raises:
        ValueError: a weight that is not a number of 0 or more.
    """

    kinds = ("label_map", "regions")

    def __init__(self, weight: float, dice_weight: float = 1.0, ce_weight: float = 1.0) -> None:
        super().__init__()
        if type(weight) not in (int, float) or not 0 <= weight < math.inf:
            raise ValueError(f"weight must be a number of 0 or more, got {weight}")
        self.weight = float(weight)
        self.dice_cross_entropy = DiceCrossEntropy(dice_weight=dice_weight, ce_weight=ce_weight)

    def forward(self, logits: Tensor, reference: Tensor, labelled: Tensor | None = None) -> Tensor:
        dice_cross_entropy: Tensor = self.dice_cross_entropy(logits, reference, labelled)
        if not self.weight:
            return dice_cross_entropy
        probability, mask = foreground(logits, reference)
        if labelled is not None:
            probability = torch.where(labelled, probability, 0)
            mask = torch.where(labelled, mask, 0)
        with torch.autocast(logits.device.type, enabled=False):
            return dice_cross_entropy + self.weight * self.term(probability, mask)

    @abstractmethod
    def term(self, probability: Tensor, mask: Tensor) -> Tensor:
        """Shape: probability and mask (batch, foreground, *spatial), fp32 -> scalar."""


def whole_number(name: str, value: int, least: int) -> int:
    """Raises: ValueError: not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
    return value
