"""Losses for logits (batch, classes, *spatial) and labels (batch, 1, *spatial); MONAI's fit the same place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.networks.outputs import heads


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
        log_probability = logits.float().log_softmax(1)
        # By a mask: `F.cross_entropy` has no deterministic backward on CUDA, and is no faster.
        mask = torch.stack([label[:, 0] == c for c in range(logits.shape[1])], 1)
        loss = self.ce_weight * -torch.where(mask, log_probability, 0).sum() / label.numel()
        return loss + self.dice_weight * (1 - self._dice(log_probability.exp()[:, 1:], mask[:, 1:].float()))

    def _dice(self, probability: Tensor, reference: Tensor) -> Tensor:
        axes = [0, *range(2, probability.ndim)]
        counts = torch.stack([(probability * reference).sum(axes), (probability + reference).sum(axes)])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            counts = _SumOverRanks.apply(counts)
        return ((2 * counts[0] + self.smooth) / (counts[1] + self.smooth)).mean()


class _SumOverRanks(torch.autograd.Function):
    """The sum of every rank's tensor; its gradient is the sum of every rank's gradient."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SumOverRanks.apply(gradients[0].contiguous())


def over_heads(loss: Callable[[Tensor, Tensor], Tensor], outputs: Any, label: Tensor, spatial_dims: int) -> Tensor:
    """The loss of a network's output: heads of deep supervision count half as much each time, finest first.

    Coarse heads see the label at their own size.
    Source: weights as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    found = heads(outputs, spatial_dims)
    weights = [0.5**i for i in range(len(found))]
    losses = [w * loss(o, _resize(label, o.shape[2:])) for w, o in zip(weights, found, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def _resize(label: Tensor, size: Sequence[int]) -> Tensor:
    return label if label.shape[2:] == size else F.interpolate(label.float(), list(size)).to(label.dtype)
