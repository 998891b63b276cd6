"""Losses for logits (batch, outputs, *spatial) and what they are compared with; MONAI's fit the same
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.models.outputs import heads
from medconv.targets.segmentation import SegmentationTargets

Loss = Callable[[Tensor, Tensor], Tensor]
_ALIKE = 1e-4  # relative; a loss that shuffled voxels change by less does not look at where they lie
_EDGE, _FEW = (
    16,
    4,
)  # voxels along each axis of what a loss is tried on; few where shuffling samples must show


class DiceCrossEntropy(nn.Module):
    """Cross-entropy plus soft Dice over the whole batch, over all devices.

    A class that a batch does not hold would give a Dice of no meaning sample by sample; counted over the
    batch it is rare. Under DDP the counts are summed over the ranks, so that several devices have the loss
    and the gradient of one. Classes that exclude each other have a softmax, and a Dice each but for the
    background; regions that overlap have a sigmoid, binary cross-entropy and a Dice each.

    Shape: logits (batch, classes, *spatial) with reference (batch, 1, *spatial) whole numbers, or logits
        (batch, regions, *spatial) with reference the same of 0 and 1; known (batch, 1, *spatial) bool ->
        scalar, computed in fp32.
    Args: dice_weight, ce_weight: of the two terms. smooth: added to the Dice ratio's counts, in voxels. Of
        `forward`: known: where the loss looks; elsewhere the gradient is 0. None: everywhere.
    Raises: ValueError: a weight or smooth that is no number of 0 or more.
    Source: Milletari et al. 2016, arXiv:1606.04797; the sum as in Isensee et al. 2021.
    """

    def __init__(self, dice_weight: float = 1.0, ce_weight: float = 1.0, smooth: float = 1e-5) -> None:
        super().__init__()
        for name, value in (("dice_weight", dice_weight), ("ce_weight", ce_weight), ("smooth", smooth)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of 0 or more, got {value}")
        self.dice_weight, self.ce_weight, self.smooth = dice_weight, ce_weight, smooth

    def forward(self, logits: Tensor, reference: Tensor, known: Tensor | None = None) -> Tensor:
        logits = logits.float()
        if logits.shape[1] == reference.shape[1]:
            probability, mask = logits.sigmoid(), reference.float()
            entropy = F.binary_cross_entropy_with_logits(logits, mask, reduction="none") / logits.shape[1]
        else:
            log_probability = logits.log_softmax(1)
            # By a mask: `F.cross_entropy` has no deterministic backward on CUDA, and is no faster.
            true = torch.stack([reference[:, 0] == c for c in range(logits.shape[1])], 1)
            entropy = -torch.where(true, log_probability, 0)
            probability, mask = log_probability.exp()[:, 1:], true[:, 1:].float()
        if known is not None:
            entropy, probability, mask = (
                torch.where(known, values, 0) for values in (entropy, probability, mask)
            )
        both, sizes, voxels = self._counts(probability, mask, known, reference[:, :1].numel())
        dice = ((2 * both + self.smooth) / (sizes + self.smooth)).mean()
        return self.ce_weight * entropy.sum() / voxels + self.dice_weight * (1 - dice)

    def _counts(
        self, probability: Tensor, mask: Tensor, known: Tensor | None, voxels: int
    ) -> tuple[Tensor, Tensor, Any]:
        """Over all ranks: common and summed sizes of prediction and reference, and the known voxels per
        rank.
        """
        axes, ranks = [0, *range(2, probability.ndim)], 1
        counts = torch.stack([(probability * mask).sum(axes), (probability + mask).sum(axes)]).flatten()
        if known is not None:
            counts = torch.cat([counts, known.sum().float()[None]])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            counts, ranks = _SumOverRanks.apply(counts), torch.distributed.get_world_size()
        size = probability.shape[1]
        return (
            counts[:size],
            counts[size : 2 * size],
            voxels if known is None else counts[-1].clamp(min=1) / ranks,
        )


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


class SegmentationLoss(nn.Module):
    """A loss of label maps, for any targets: it turns them into masks of regions, and leaves out what is to
    be ignored.

    A loss that takes `known`, as ours does, is told where to look. Any other is handed the known voxels
    alone, as one sample in a row, which is exact for a loss that sums over the voxels of a batch wherever
    they lie. Whether it does, and whether it takes such logits and label maps at all, is tried on a few
    numbers.
    Shape: logits (batch, outputs, *spatial), label (batch, 1, *spatial) -> scalar; 0 where no voxel is known.
    Args: spatial_dims: of the images; None is 3 or 2, whichever the loss takes.
    Raises: ValueError: the loss cannot take such targets.
    """

    def __init__(self, loss: Loss, targets: SegmentationTargets, spatial_dims: int | None = None) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets
        self.takes_known = (
            "known" in signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
        )
        if (error := self._refused(spatial_dims or 3)) and (spatial_dims or self._refused(2)):
            raise error

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        reference, known = self.targets.reference(label), self.targets.known(label)
        if known is None:
            return self.loss(logits, reference)
        if self.takes_known:
            return self.loss(logits, reference, known=known)  # type: ignore[call-arg]
        if not known.any():
            return logits[:0].sum()  # with a gradient, of 0
        return self.loss(_in_a_row(logits, known), _in_a_row(reference, known))

    def _refused(self, spatial_dims: int) -> ValueError | None:
        """What speaks against the loss: it does not take such masks or label maps, or minds where voxels
        lie.
        """
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        if kinds := getattr(self.loss, "kinds", ()):
            return ValueError(
                f"loss: {name} is for whole images ({' and '.join(kinds)}), not label maps; take loss=dice_ce"
            )
        try:
            found, shuffled = self._tried(spatial_dims)
        except torch.OutOfMemoryError:  # no fault of the loss; if it lasts, the first step says what helps
            return None
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            refused = ValueError(f"loss: {name} cannot take {self._kind(spatial_dims)}: {told}")
            refused.__cause__ = error
            return refused
        if not math.isfinite(found + shuffled):
            return ValueError(
                f"loss: {name} is {found + shuffled} for {self._kind(spatial_dims)}, expected a finite number"
            )
        if abs(found - shuffled) <= _ALIKE * abs(found):
            return None
        return ValueError(
            f"loss: {name} is not the same once the voxels of a batch are shuffled ({found:.4g}, "
            f"{shuffled:.4g}), so that the voxels to ignore cannot be left out of it; take loss.batch=true "
            "where it has that, or loss=dice_ce"
        )

    def _tried(self, spatial_dims: int) -> tuple[float, float]:
        """The loss of random numbers, and of the same shuffled where it will be handed voxels in a row."""
        shuffles = self.targets.ignore is not None and not self.takes_known
        draw, size = torch.Generator().manual_seed(0), (_FEW if shuffles else _EDGE,) * spatial_dims
        logits = torch.randn(2, self.targets.num_outputs, *size, generator=draw)
        label = torch.randint(self.targets.num_values, (2, 1, *size), generator=draw)
        order = torch.randperm(label.numel(), generator=draw)
        reference = self.targets.reference(label)
        with torch.no_grad():
            found = float(self.loss(logits, reference))
            if not shuffles:
                return found, found
            everywhere = torch.ones_like(label, dtype=torch.bool)
            return found, float(
                self.loss(*(_in_a_row(values, everywhere)[:, :, order] for values in (logits, reference)))
            )

    def _kind(self, spatial_dims: int) -> str:
        if self.targets.overlapping:
            return "regions that overlap, one mask each"
        ignoring = "" if self.targets.ignore is None else ", and voxels to ignore"
        return f"classes{ignoring}, as a label map (batch, 1, {', '.join('xyz'[:spatial_dims])})"


def over_heads(loss: Loss, outputs: Any, label: Tensor, spatial_dims: int) -> Tensor:
    """The loss of a network's output: heads of deep supervision count half as much each time, finest first.

    Coarse heads see the label at their own size.
    Source: weights as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    found = heads(outputs, spatial_dims)
    weights = [0.5**i for i in range(len(found))]
    losses = [w * loss(o, _resize(label, o.shape[2:])) for w, o in zip(weights, found, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def cross_entropy(logits: Tensor, label: Tensor, targets: SegmentationTargets) -> float | None:
    """Mean over the known voxels, of regions over these as well; None where no voxel is known.

    Shape: logits (batch, outputs, *spatial), label (batch, 1, *spatial).
    """
    label = label.to(logits.device)  # logits that a GPU has no room for lie in main memory
    known, reference = targets.known(label), targets.reference(label)
    if known is not None:
        if not known.any():
            return None
        logits, reference = _in_a_row(logits, known), _in_a_row(reference, known)
    if targets.overlapping:
        return float(F.binary_cross_entropy_with_logits(logits, reference.float()))
    return float(F.cross_entropy(logits, reference[:, 0].long()))


def _in_a_row(values: Tensor, known: Tensor) -> Tensor:
    """The known voxels of all samples; (batch, channels, *spatial) -> (1, channels, voxels, 1, ...)."""
    row = values.movedim(1, -1)[known[:, 0]].T
    return row.reshape(1, *row.shape, *(1,) * (values.ndim - 3))


def _resize(label: Tensor, size: Sequence[int]) -> Tensor:
    return label if label.shape[2:] == size else F.interpolate(label.float(), list(size)).to(label.dtype)
