"""Segmentation losses for logits (batch, outputs, *spatial). MONAI's losses can be used in their place."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DiceCrossEntropy(nn.Module):
    """Cross-entropy plus soft Dice, computed over the whole batch and all devices.

    The Dice of a class that is absent from a sample means nothing; a class absent from the whole batch is
    rarer. Under DDP the counts are summed over the ranks, so that several devices have the loss and the
    gradient of one. Exclusive classes use a softmax and the Dice of each class except the background;
    overlapping regions use a sigmoid, binary cross-entropy and the Dice of each region.

    Shape: logits (batch, classes, *spatial) with reference (batch, 1, *spatial) of class indices, or logits
        (batch, regions, *spatial) with reference (batch, regions, *spatial) of 0 and 1; labelled
        (batch, 1, *spatial) bool -> scalar, computed in fp32.
    Args:
        dice_weight, ce_weight: of the two terms.
        smooth: added to numerator and denominator of the Dice, in voxels.
        labelled: of `forward`: the voxels that count; elsewhere the gradient is 0. None: all.
    Raises: ValueError: a weight or smooth that is not a number of 0 or more.
    Source: Milletari et al. 2016, arXiv:1606.04797; the sum as in Isensee et al. 2021.
    """

    kinds = ("label_map", "regions")

    def __init__(self, dice_weight: float = 1.0, ce_weight: float = 1.0, smooth: float = 1e-5) -> None:
        super().__init__()
        for name, value in (("dice_weight", dice_weight), ("ce_weight", ce_weight), ("smooth", smooth)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of 0 or more, got {value}")
        self.dice_weight, self.ce_weight, self.smooth = dice_weight, ce_weight, smooth

    def forward(self, logits: Tensor, reference: Tensor, labelled: Tensor | None = None) -> Tensor:
        logits = logits.float()
        if logits.shape[1] == reference.shape[1]:
            probability, mask = logits.sigmoid(), reference.float()
            entropy = F.binary_cross_entropy_with_logits(logits, mask, reduction="none") / logits.shape[1]
        else:
            log_probability = logits.log_softmax(1)
            # A mask, since `F.cross_entropy` has no deterministic backward on CUDA and is not faster.
            true = torch.stack([reference[:, 0] == c for c in range(logits.shape[1])], 1)
            entropy = -torch.where(true, log_probability, 0)
            probability, mask = log_probability.exp()[:, 1:], true[:, 1:].float()
        if labelled is not None:
            entropy, probability, mask = (
                torch.where(labelled, values, 0) for values in (entropy, probability, mask)
            )
        both, sizes, voxels = self._counts(probability, mask, labelled, reference[:, :1].numel())
        dice: Tensor = ((2 * both + self.smooth) / (sizes + self.smooth)).mean()
        return self.ce_weight * entropy.sum() / voxels + self.dice_weight * (1 - dice)

    def _counts(
        self, probability: Tensor, mask: Tensor, labelled: Tensor | None, voxels: int
    ) -> tuple[Tensor, Tensor, Tensor | int]:
        """Summed over all ranks: intersection, and size of prediction plus size of reference. Third: labelled
        voxels per rank.
        """
        axes, ranks = [0, *range(2, probability.ndim)], 1
        counts = torch.stack([(probability * mask).sum(axes), (probability + mask).sum(axes)]).flatten()
        if labelled is not None:
            counts = torch.cat([counts, labelled.sum().float()[None]])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            counts, ranks = _SumOverRanks.apply(counts), torch.distributed.get_world_size()
        size = probability.shape[1]
        return (
            counts[:size],
            counts[size : 2 * size],
            voxels if labelled is None else counts[-1].clamp(min=1) / ranks,
        )


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over all ranks; its gradient is the sum of the ranks' gradients."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SumOverRanks.apply(gradients[0].contiguous())
