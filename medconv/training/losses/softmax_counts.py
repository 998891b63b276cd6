"""Cross-entropy and soft Dice's voxel counts of exclusive classes, in few passes over the logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
        log_probability = _log_softmax(logits)
        # of the voxel's own class, each (batch, 1, *spatial)
        own_log_probability = log_probability.gather(1, reference)
        probability = log_probability.exp_()
        own_probability = probability.gather(1, reference)
        entropy = -_counted(own_log_probability, reference, labelled, class_weights).sum()
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
        one_per_class = sizes_grad.view(1, -1, *_ones(probability))
        grad = probability * one_per_class
        mean_grad = grad.sum(1, keepdim=True)
        entropy_grad = entropy_grad * _of_class(class_weights, reference)
        # What the gradient of a voxel's own class has more than the others
        own_grad = intersection_grad[reference] * probability.gather(1, reference)
        grad.addcmul_(probability, entropy_grad - mean_grad - own_grad)
        at_class = grad.gather(1, reference) + own_grad - entropy_grad
        grad.scatter_(1, reference, at_class)
        if labelled is not None:
            grad.masked_fill_(~labelled, 0)
        return grad, None, None, None


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the classes, in the layout of the logits: a GPU's softmax copies channels-last ones otherwise."""
    if logits.is_contiguous():
        return logits.log_softmax(1)
    return logits.movedim(1, -1).log_softmax(-1).movedim(-1, 1)


def _counted(
    log_probability: Tensor, reference: Tensor, labelled: Tensor | None, class_weights: Tensor | None
) -> Tensor:
    return _masked(log_probability, labelled) * _of_class(class_weights, reference)


def _masked(values: Tensor, labelled: Tensor | None) -> Tensor:
    """0 where nothing is labelled, also in place of an infinite value."""
    return values if labelled is None else torch.where(labelled, values, 0)


def _of_class(class_weights: Tensor | None, reference: Tensor) -> Tensor | float:
    """The weight of each voxel's class."""
    return 1.0 if class_weights is None else class_weights[reference]


def _sum_over_voxels(values: Tensor) -> Tensor:
    """Shape: (batch, classes, *spatial) -> (classes,)."""
    return values.sum([0, *range(2, values.ndim)])


def _ones(values: Tensor) -> Sequence[int]:
    return (1,) * (values.ndim - 2)
