"""Losses for logits (batch, classes, *spatial) and labels (batch, 1, *spatial); MONAI's fit the same place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import nn as distributed_nn
from torch.nn import functional as F


class DiceCrossEntropy(nn.Module):
    """Cross-entropy plus soft Dice over the whole batch, over all devices.

    A class that a batch does not hold would give a Dice of no meaning sample by sample; counted over the batch it is
    rare. Under DDP the counts are summed over the ranks, so that several devices have the loss and the gradient of one.

    Shape: logits (batch, classes, *spatial), label (batch, 1, *spatial) whole numbers -> scalar, computed in fp32.
    Args: dice_weight, ce_weight: of the two terms. smooth: added to the Dice ratio's counts, in voxels.
    Source: Milletari et al. 2016, arXiv:1606.04797; the sum as in Isensee et al. 2021.
    """

    def __init__(self, dice_weight: float = 1.0, ce_weight: float = 1.0, smooth: float = 1e-5) -> None:
        super().__init__()
        self.dice_weight, self.ce_weight, self.smooth = dice_weight, ce_weight, smooth

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        logits, target = logits.float(), label[:, 0].long()
        loss = self.ce_weight * F.cross_entropy(logits, target)
        return loss + self.dice_weight * (1 - self._dice(logits, target))

    def _dice(self, logits: Tensor, target: Tensor) -> Tensor:
        probability = logits.softmax(1)[:, 1:]
        reference = torch.stack([target == c for c in range(1, logits.shape[1])], 1).float()
        axes = [0, *range(2, logits.ndim)]
        counts = torch.stack([(probability * reference).sum(axes), (probability + reference).sum(axes)])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            counts = distributed_nn.functional.all_reduce(counts)
        return ((2 * counts[0] + self.smooth) / (counts[1] + self.smooth)).mean()
