"""Segmentation losses for logits (batch, outputs, *spatial). MONAI's losses can be used in their place."""

import math
from collections.abc import Callable, Mapping, Sequence
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
        class_weights: one number for each output, or by name; those not named, and `background`, have 1. A
            number multiplies the cross-entropy of a class's voxels (of a region, of its output), which
            is not divided by the sum of the weights, and is the class's weight in the mean Dice.
        class_names: of the foreground.
        smooth: added to numerator and denominator of the Dice, in voxels.
        labelled: of `forward`: the voxels that count; elsewhere the gradient is 0. None: all.
    Raises: ValueError: a weight or smooth that is not a number of 0 or more; an unknown name.
    Source: Milletari et al. 2016, arXiv:1606.04797; the sum as in Isensee et al. 2021.
    """

    kinds = ("label_map", "regions")

    weights: Tensor | None

    def __init__(
        self,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        smooth: float = 1e-5,
        class_weights: Sequence[float] | Mapping[str, float] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        for name, value in (("dice_weight", dice_weight), ("ce_weight", ce_weight), ("smooth", smooth)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of 0 or more, got {value}")
        self.dice_weight, self.ce_weight, self.smooth = dice_weight, ce_weight, smooth
        weights, self.by_name = _numbers(class_weights, class_names), isinstance(class_weights, Mapping)
        self.register_buffer("weights", None if weights is None else torch.tensor(weights), persistent=False)

    def forward(self, logits: Tensor, reference: Tensor, labelled: Tensor | None = None) -> Tensor:
        logits, weights = logits.float(), self._weights_of(logits.shape[1])
        if logits.shape[1] == reference.shape[1]:
            probability, mask = logits.sigmoid(), reference.float()
            entropy = F.binary_cross_entropy_with_logits(logits, mask, reduction="none") / logits.shape[1]
        else:
            log_probability = logits.log_softmax(1)
            # A mask, since `F.cross_entropy` has no deterministic backward on CUDA and is not faster.
            true = torch.stack([reference[:, 0] == c for c in range(logits.shape[1])], 1)
            entropy = -torch.where(true, log_probability, 0)
            probability, mask = log_probability.exp()[:, 1:], true[:, 1:].float()
        if weights is not None:
            entropy = entropy * weights.view(1, -1, *(1,) * (logits.ndim - 2))
        if labelled is not None:
            entropy, probability, mask = (
                torch.where(labelled, values, 0) for values in (entropy, probability, mask)
            )
        both, sizes, voxels = self._counts(probability, mask, labelled, reference[:, :1].numel())
        dice: Tensor = (2 * both + self.smooth) / (sizes + self.smooth)
        shares = None if weights is None else weights[-len(dice) :]
        dice = dice.mean() if shares is None else (dice * shares).sum() / shares.sum()
        return self.ce_weight * entropy.sum() / voxels + self.dice_weight * (1 - dice)

    def _weights_of(self, outputs: int) -> Tensor | None:
        """One for each output. Raises: ValueError: there are not as many."""
        if self.weights is None:
            return None
        weights = self.weights[-outputs:] if self.by_name else self.weights  # regions have no background
        if len(weights) != outputs:
            what = f"{outputs} numbers, one for each output"
            raise ValueError(f"loss.class_weights must be {what}, got {len(weights)}")
        return weights

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


def _numbers(setting: Any, names: Sequence[str]) -> list[float] | None:
    """Weights of all outputs, the background's first where the setting has one or is by name."""
    if setting is None:
        return None
    known = ["background", *names]
    if isinstance(setting, Mapping):
        if unknown := [name for name in setting if name not in known]:
            raise ValueError(f"loss.class_weights: no class {unknown[0]}; there are {', '.join(known)}")
        setting = [setting.get(name, 1.0) for name in known]
    lists = isinstance(setting, Sequence) and not isinstance(setting, str)
    if not lists or not all(type(w) in (int, float) and 0 <= w < math.inf for w in setting):
        what = "numbers of 0 or more, one for each output or by name"
        raise ValueError(f"loss.class_weights must be {what}, got {setting}")
    if not any(setting[-len(names) :] if names else setting):
        raise ValueError(f"loss.class_weights: a class must have a weight above 0, got {list(setting)}")
    return [float(weight) for weight in setting]


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
