"""Segmentation losses for logits (batch, outputs, *spatial). MONAI's losses can be used in their place."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from medconv.training.losses.fit import LossArgumentError, is_weight

# The least probability of a voxel's own class, so that a class that is missed for certain is there
_TINY = torch.finfo(torch.float32).tiny


class DiceCrossEntropy(nn.Module):
    """Cross-entropy plus soft Dice, over the whole batch and all devices unless `batch_dice` is False.

    The Dice of a class that is absent from a sample means nothing; a class absent from the whole batch is
    rarer. But where samples differ much, as pictures of several kinds do, one Dice over all of them hardly
    counts those with little foreground: `batch_dice=False` takes the mean of the samples' own.

    Under DDP the counts are summed over the ranks, so that several devices have the loss and the gradient of
    one. Exclusive classes use a softmax and the Dice of each class except the background; overlapping regions
    use a sigmoid, binary cross-entropy and the Dice of each region.

    Shape:
        logits (batch, classes, *spatial) with reference (batch, 1, *spatial) of class indices, or
        logits (batch, regions, *spatial) with reference (batch, regions, *spatial) of 0 and 1;
        labelled (batch, 1, *spatial) bool -> scalar, computed in fp32.
    Args:
        dice_weight: of the Dice term.
        ce_weight: of the cross-entropy term.
        smooth: added to numerator and denominator of the Dice, in voxels.
        class_weights: one number for each output, or by name; those not named, and `background`, have 1. A
            number multiplies the cross-entropy of a class's voxels (of a region, of its output), which
            is not divided by the sum of the weights, and is the class's weight in the mean Dice.
        class_names: of the foreground.
        batch_dice: one Dice of each class over the whole batch; False: the mean over the samples that have
            the class.
        labelled: of `forward`: the voxels that count; elsewhere the gradient is 0. None: all.
    Raises:
        ValueError: a weight or smooth that is not a number of 0 or more; an unknown name.
        LossArgumentError: in `forward`: `class_weights` has another length than the outputs.
    Source: Milletari et al. 2016, arXiv:1606.04797; the sum as in Isensee et al. 2021.
    """

    kinds: ClassVar[tuple[str, ...]] = ("label_map", "regions")

    weights: Tensor | None

    def __init__(
        self,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        smooth: float = 1e-5,
        class_weights: Sequence[float] | Mapping[str, float] | None = None,
        class_names: Sequence[str] = (),
        *,
        batch_dice: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("dice_weight", dice_weight), ("ce_weight", ce_weight), ("smooth", smooth)):
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of 0 or more, got {value}")
        self.dice_weight = dice_weight
        self.ce_weight = ce_weight
        self.batch_dice = batch_dice
        self.smooth = smooth
        self.by_name = isinstance(class_weights, Mapping)
        weights = None
        if class_weights is not None:
            weights = torch.tensor(_list_of_weights(class_weights, class_names))
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, logits: Tensor, reference: Tensor, labelled: Tensor | None = None) -> Tensor:
        logits = logits.float()
        num_outputs = logits.shape[1]
        weights = None if self.weights is None else self.weights.float()
        if weights is not None and self.by_name:
            # One is for the background, which regions do not have
            weights = weights[-num_outputs:]
        if weights is not None and len(weights) != num_outputs:
            raise LossArgumentError(
                f"class_weights must be {num_outputs} numbers, one for each output, got {len(weights)}"
            )
        sums = self.sums if self.batch_dice else self._dice_of_samples
        entropy, numerator, denominator = sums(logits, reference, labelled, weights)
        # One communication for all sums
        counts = [numerator, denominator, *([] if labelled is None else [labelled.sum().float()[None]])]
        totals, ranks = sum_over_ranks(torch.cat(counts))
        num_dice = len(numerator)  # without the background, which has no Dice
        # Voxels with a label, per rank
        num_labelled = reference[:, :1].numel() if labelled is None else totals[-1].clamp(min=1) / ranks
        numerator, denominator = totals[:num_dice], totals[num_dice : 2 * num_dice]
        dice: Tensor
        if self.batch_dice:
            total = denominator + self.smooth
            there = total > 0  # else smooth is 0, and no voxel that counts can have the class
            dice = torch.where(there, (2 * numerator + self.smooth) / torch.where(there, total, 1), 1)
        else:
            dice = torch.where(denominator > 0, numerator / denominator.clamp(min=1), 1)
        if weights is None:
            mean_dice = dice.mean()
        else:
            foreground_weights = weights[-num_dice:]  # all 0 where the background's alone is not
            mean_dice = (dice * foreground_weights).sum() / foreground_weights.sum().clamp(min=_TINY)
        return self.ce_weight * entropy / num_labelled + self.dice_weight * (1 - mean_dice)

    def _dice_of_samples(
        self, logits: Tensor, reference: Tensor, labelled: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy summed over voxels; of each class, the Dice summed over the samples that have it, and
        the number of these.
        """
        entropies = []
        dice = []
        present = []
        masks = [None] * len(logits) if labelled is None else labelled.split(1)
        for one, its_reference, its_mask in zip(logits.split(1), reference.split(1), masks, strict=True):
            entropy, intersection, sizes = self.sums(one, its_reference, its_mask, weights)
            is_present = intersection.detach() > 0
            entropies.append(entropy)
            # Above 0 also where no voxel counts
            own_dice = (2 * intersection + self.smooth) / (sizes + self.smooth).clamp(min=1e-12)
            dice.append(torch.where(is_present, own_dice, 0))
            present.append(is_present.float())
        return torch.stack(entropies).sum(), torch.stack(dice).sum(0), torch.stack(present).sum(0)

    def sums(
        self, logits: Tensor, reference: Tensor, labelled: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy summed over voxels; intersection and sizes of each class but the background, or of
        each region.
        """
        if reference.shape[1] == logits.shape[1]:
            return _region_sums(logits, reference, labelled, weights)
        entropy, intersection, sizes = softmax_counts(logits, reference, labelled, weights)
        # The background has no Dice
        return entropy, intersection[1:], sizes[1:]


def foreground(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Probability and mask of each class but the background, or of each region; fp32.

    Shape: logits and reference as of `DiceCrossEntropy` -> twice (batch, foreground, *spatial).
    """
    logits = logits.float()
    if reference.shape[1] == logits.shape[1]:
        return logits.sigmoid(), reference.float()
    masks = [reference[:, 0] == index for index in range(1, logits.shape[1])]
    # The background has no Dice
    return logits.softmax(1)[:, 1:], torch.stack(masks, 1).float()


def counted(
    entropy: Tensor, probability: Tensor, reference: Tensor, labelled: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first three, the entropy times the weight of each output; 0 where nothing is labelled.

    Shape: each (batch, outputs, *spatial); labelled (batch, 1, *spatial) bool, weights (outputs,).
    """
    if weights is not None:
        entropy = entropy * weights.view(1, -1, *(1,) * (entropy.ndim - 2))
    if labelled is not None:
        entropy = torch.where(labelled, entropy, 0)
        probability = torch.where(labelled, probability, 0)
        reference = torch.where(labelled, reference, 0)
    return entropy, probability, reference


def _region_sums(
    logits: Tensor, reference: Tensor, labelled: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy summed over voxels, mean over regions; intersection and sizes of each region."""
    mask = reference.float()
    entropy = F.binary_cross_entropy_with_logits(logits, mask, reduction="none")
    probability = logits.sigmoid()
    entropy, probability, mask = counted(entropy, probability, mask, labelled, weights)
    axes = [0, *range(2, logits.ndim)]
    intersection = (probability * mask).sum(axes) + _TINY * mask.sum(axes)
    sizes = (probability + mask).sum(axes)
    return entropy.sum() / logits.shape[1], intersection, sizes


def _list_of_weights(class_weights: Any, class_names: Sequence[str]) -> list[float]:
    """Weights of all outputs, the background's first where there is one or weights are given by name."""
    if isinstance(class_weights, Mapping):
        names = ["background", *class_names]
        class_weights = {
            str(name): weight for name, weight in class_weights.items()
        }  # classes may be numbers
        unknown = [name for name in class_weights if name not in names]
        if unknown:
            raise ValueError(f"class_weights: no class {unknown[0]}; there are {', '.join(names)}")
        class_weights = [class_weights.get(name, 1.0) for name in names]
    is_list = isinstance(class_weights, Sequence) and not isinstance(class_weights, str)
    if not is_list or not all(is_weight(weight) for weight in class_weights):
        raise ValueError(
            f"class_weights must be numbers of 0 or more, one for each output or by name, got {class_weights}"
        )
    foreground = class_weights[-len(class_names) :] if class_names else class_weights
    if not any(foreground):
        raise ValueError(f"class_weights: a class must have a weight above 0, got {list(class_weights)}")
    return [float(weight) for weight in class_weights]


def sum_over_ranks(of_this_rank: Tensor) -> tuple[Tensor, int]:
    """The sum of a tensor over all ranks, with the gradient of the sum; and the number of ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return of_this_rank, 1
    return _SumOverRanks.apply(of_this_rank), torch.distributed.get_world_size()


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over all ranks; its gradient is the sum of the ranks' gradients."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, of_this_rank: Tensor) -> Tensor:
        total = of_this_rank.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SumOverRanks.apply(gradients[0].contiguous())


def softmax_counts(
    logits: Tensor, reference: Tensor, labelled: Tensor | None = None, class_weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the cross-entropy over all voxels, and each class's counts.

    Written with torch's own operations, forward and backward make some thirty passes over tensors as large as
    the logits, of which many are kept for the backward pass. Here they make 14 and keep the probabilities.

    Shape: logits (batch, classes, *spatial) of fp32 or fp64, reference (batch, 1, *spatial) of class indices,
        labelled (batch, 1, *spatial) bool, class_weights (classes,) -> entropy (); intersection (classes,),
        the probability of each class in its own voxels; sizes (classes,), its probability in all voxels plus
        the number of its voxels.
    Args:
        labelled: the voxels that count; None: all.
        class_weights: of the cross-entropy of a class's voxels; None: 1.
    """
    outputs: tuple[Tensor, Tensor, Tensor] = _SoftmaxCounts.apply(
        logits, reference.long(), labelled, class_weights
    )
    return outputs


class _SoftmaxCounts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, reference: Tensor, labelled: Tensor | None, class_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if logits.is_contiguous():
            log_probability = logits.log_softmax(1)
        else:  # in the layout of the logits: a GPU's softmax copies channels-last ones otherwise
            log_probability = logits.movedim(1, -1).log_softmax(-1).movedim(-1, 1)
        # of the voxel's own class, each (batch, 1, *spatial)
        own_log_probability = log_probability.gather(1, reference)
        probability = log_probability.exp_()
        own_probability = probability.gather(1, reference).clamp_(min=_TINY)
        voxel_entropy = -_masked(own_log_probability, labelled)
        if class_weights is not None:
            voxel_entropy = voxel_entropy * class_weights[reference]
        entropy = voxel_entropy.sum()
        # One-hot, so that sums need no atomic operations, which on a GPU are slow and in no fixed order
        one_hot = torch.zeros_like(probability)
        intersection = _sum_over_voxels(one_hot.scatter_(1, reference, _masked(own_probability, labelled)))
        is_counted = torch.ones_like(own_probability) if labelled is None else labelled.to(logits.dtype)
        num_voxels = _sum_over_voxels(one_hot.scatter_(1, reference, is_counted))
        sizes = _sum_over_voxels(_masked(probability, labelled)) + num_voxels
        ctx.save_for_backward(probability, reference, labelled, class_weights)
        return entropy, intersection, sizes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """With p the softmax and g its gradient, the gradient of logit k is p_k (g_k - sum_j p_j g_j)."""
        entropy_grad, intersection_grad, sizes_grad = gradients
        probability, reference, labelled, class_weights = ctx.saved_tensors
        one_per_class = sizes_grad.view(1, -1, *(1,) * (probability.ndim - 2))
        grad = probability * one_per_class
        mean_grad = grad.sum(1, keepdim=True)
        if class_weights is not None:
            entropy_grad = entropy_grad * class_weights[reference]
        # What the gradient of a voxel's own class has more than the others
        own_grad = intersection_grad[reference] * probability.gather(1, reference)
        grad.addcmul_(probability, entropy_grad - mean_grad - own_grad)
        at_class = grad.gather(1, reference) + own_grad - entropy_grad
        grad.scatter_(1, reference, at_class)
        if labelled is not None:
            grad.masked_fill_(~labelled, 0)
        return grad, None, None, None


def _masked(values: Tensor, labelled: Tensor | None) -> Tensor:
    """0 where nothing is labelled, also in place of an infinite value."""
    return values if labelled is None else torch.where(labelled, values, 0)


def _sum_over_voxels(values: Tensor) -> Tensor:
    """Shape: (batch, classes, *spatial) -> (classes,)."""
    return values.sum([0, *range(2, values.ndim)])
