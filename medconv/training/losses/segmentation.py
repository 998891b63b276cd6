"""Segmentation losses for logits (batch, outputs, *spatial). MONAI's losses can be used in their place."""

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
_TOLERANCE = 1e-4  # relative; a loss that changes by less when voxels are shuffled ignores their positions
_EDGE, _SHORT_EDGE = 16, 4  # voxels along each axis of the trial batch; the short one when it is shuffled


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
        dice = ((2 * both + self.smooth) / (sizes + self.smooth)).mean()
        return self.ce_weight * entropy.sum() / voxels + self.dice_weight * (1 - dice)

    def _counts(
        self, probability: Tensor, mask: Tensor, labelled: Tensor | None, voxels: int
    ) -> tuple[Tensor, Tensor, Any]:
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

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SumOverRanks.apply(gradients[0].contiguous())


class SegmentationLoss(nn.Module):
    """Any loss, adapted to segmentation targets: encodes label maps as masks and excludes ignored voxels.

    A loss with an argument `labelled`, like ours, gets the mask of labelled voxels. Any other loss gets only
    these voxels, in one row as a single sample. This is exact for losses that sum over a batch's voxels
    regardless of their positions. A trial on random numbers checks this, and that the loss accepts such
    logits and label maps.
    Shape: logits (batch, outputs, *spatial), label (batch, 1, *spatial) -> scalar; 0 if no voxel is labelled.
    Args: spatial_dims: of the images; None: 3, or 2 if the loss fails in 3D.
    Raises: ValueError: the loss does not fit the targets.
    """

    def __init__(self, loss: Loss, targets: SegmentationTargets, spatial_dims: int | None = None) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets
        self.takes_mask = (
            "labelled" in signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
        )
        if (problem := self._problem(spatial_dims or 3)) and (spatial_dims or self._problem(2)):
            raise problem

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        reference, labelled = self.targets.reference(label), self.targets.labelled(label)
        if labelled is None:
            return self.loss(logits, reference)
        if self.takes_mask:
            return self.loss(logits, reference, labelled=labelled)  # type: ignore[call-arg]
        if not labelled.any():
            return logits[:0].sum()  # 0, with a gradient of 0
        return self.loss(_labelled_voxels(logits, labelled), _labelled_voxels(reference, labelled))

    def _problem(self, spatial_dims: int) -> ValueError | None:
        """Why the loss does not fit: it fails on such masks or label maps, or depends on where voxels lie.
        None: it fits.
        """
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        if kinds := getattr(self.loss, "kinds", ()):
            return ValueError(
                f"loss: {name} is for image-level {' and '.join(kinds)} targets, not label maps; "
                "use loss=dice_ce"
            )
        try:
            plain, shuffled = self._trial_losses(spatial_dims)
        except (
            torch.OutOfMemoryError
        ):  # not the loss's fault; if it lasts, the first training step reports it
            return None
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            problem = ValueError(f"loss: {name} cannot take {self._description(spatial_dims)}: {reason}")
            problem.__cause__ = error
            return problem
        if not math.isfinite(plain + shuffled):
            return ValueError(
                f"loss: {name} is {plain + shuffled} for {self._description(spatial_dims)}, expected a "
                "finite number"
            )
        if abs(plain - shuffled) <= _TOLERANCE * abs(plain):
            return None
        return ValueError(
            f"loss: {name} changes when the voxels of a batch are shuffled ({plain:.4g}, {shuffled:.4g}), so "
            "ignored voxels cannot be excluded from it; use loss.batch=true if it has that argument, or "
            "loss=dice_ce"
        )

    def _trial_losses(self, spatial_dims: int) -> tuple[float, float]:
        """The loss of random numbers, and of the same voxels shuffled if it will get labelled voxels only."""
        shuffles = self.targets.ignore is not None and not self.takes_mask
        generator = torch.Generator().manual_seed(0)
        size = (_SHORT_EDGE if shuffles else _EDGE,) * spatial_dims
        logits = torch.randn(2, self.targets.num_outputs, *size, generator=generator)
        label = torch.randint(self.targets.num_values, (2, 1, *size), generator=generator)
        order = torch.randperm(label.numel(), generator=generator)
        reference = self.targets.reference(label)
        with torch.no_grad():
            plain = float(self.loss(logits, reference))
            if not shuffles:
                return plain, plain
            everywhere = torch.ones_like(label, dtype=torch.bool)
            rows = [_labelled_voxels(values, everywhere)[:, :, order] for values in (logits, reference)]
            return plain, float(self.loss(*rows))

    def _description(self, spatial_dims: int) -> str:
        if self.targets.overlapping:
            return "overlapping regions, one mask each"
        ignoring = "" if self.targets.ignore is None else " and ignored voxels"
        return f"classes{ignoring}, as a label map (batch, 1, {', '.join('xyz'[:spatial_dims])})"


def over_heads(loss: Loss, outputs: Any, label: Tensor, spatial_dims: int) -> Tensor:
    """The loss of a network's outputs. Under deep supervision each coarser head has half the weight.

    The label is resized to the size of each head.
    Source: weights as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    logits = heads(outputs, spatial_dims)
    weights = [0.5**i for i in range(len(logits))]
    losses = [w * loss(o, _resize(label, o.shape[2:])) for w, o in zip(weights, logits, strict=True)]
    return torch.stack(losses).sum() / sum(weights)


def cross_entropy(logits: Tensor, label: Tensor, targets: SegmentationTargets) -> float | None:
    """Mean cross-entropy over the labelled voxels (and regions, if they overlap); None if there are none.

    Shape: logits (batch, outputs, *spatial), label (batch, 1, *spatial).
    """
    label = label.to(logits.device)  # large logits are moved from a GPU to main memory
    labelled, reference = targets.labelled(label), targets.reference(label)
    if labelled is not None:
        if not labelled.any():
            return None
        logits, reference = _labelled_voxels(logits, labelled), _labelled_voxels(reference, labelled)
    if targets.overlapping:
        return float(F.binary_cross_entropy_with_logits(logits, reference.float()))
    return float(F.cross_entropy(logits, reference[:, 0].long()))


def _labelled_voxels(values: Tensor, labelled: Tensor) -> Tensor:
    """The labelled voxels of all samples: (batch, channels, *spatial) -> (1, channels, voxels, 1, ...)."""
    row = values.movedim(1, -1)[labelled[:, 0]].T
    return row.reshape(1, *row.shape, *(1,) * (values.ndim - 3))


def _resize(label: Tensor, size: Sequence[int]) -> Tensor:
    return label if label.shape[2:] == size else F.interpolate(label.float(), list(size)).to(label.dtype)
