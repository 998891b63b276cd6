"""Losses for image-level targets: outputs and targets both have the shape (batch, outputs)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.training.losses.fit import LossArgumentError, is_weight

_PENALTIES = ("mse", "l1", "huber")


class CrossEntropy(nn.Module):
    """Cross-entropy for multiclass targets, or binary cross-entropy of each label for multilabel targets.

    The loss is a mean over samples and is not divided by the sum of the class weights. So several devices,
    or accumulated batches, have the gradient of one large batch. The mean of `balanced` weights over the
    training cases is 1.

    Shape:
        logits (batch, outputs), target (batch, outputs): probability of each class or label -> scalar,
        computed in fp32.
    Args:
        exclusive: true for multiclass, false for multilabel.
        label_smoothing: share of the target that is spread evenly over all classes, or over present and
            absent.
        class_weights: `none`, `balanced`, or one number per output. A number multiplies the loss of a
            class's samples; for a label, that of the samples that have it. `balanced` gives all classes
            the same total weight, and so the samples with and without a label.
        class_counts: training cases of each class or label; for `balanced`.
        num_cases: all training cases; for `balanced`.
    Raises:
        ValueError: values out of range; `balanced` without counts or with a class that has no case.
        LossArgumentError: in `forward`: `class_weights` has another length than the outputs.
    """

    weights: Tensor | None

    def __init__(
        self,
        exclusive: bool = True,
        label_smoothing: float = 0.0,
        class_weights: str | Sequence[float] | None = "none",
        class_counts: Sequence[int] | None = None,
        num_cases: int | None = None,
    ) -> None:
        super().__init__()
        if type(label_smoothing) not in (int, float) or not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be a number from 0 to below 1, got {label_smoothing}")
        self.exclusive = exclusive
        self.label_smoothing = float(label_smoothing)
        weights = _list_of_weights(class_weights, exclusive, class_counts, num_cases)
        self.register_buffer("weights", None if weights is None else torch.tensor(weights), persistent=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("multiclass",) if self.exclusive else ("multilabel",)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        target = target.float()
        _check_shapes(logits, target)
        num_outputs = logits.shape[1]
        if self.weights is not None and len(self.weights) != num_outputs:
            raise LossArgumentError(
                f"class_weights must be {num_outputs} numbers, one per output, got {len(self.weights)}"
            )
        if self.exclusive:
            return F.cross_entropy(logits, target, self.weights, label_smoothing=self.label_smoothing)
        # for each label, presence and absence share what is taken from the true one
        target = target * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=self.weights)


class RegressionLoss(nn.Module):
    """Regression loss of standardised values: the mean over samples and outputs.

    Shape:
        outputs (batch, values), target (batch, values) -> scalar, computed in fp32.
    Args:
        penalty: of an error: `mse`, its square; `l1`, its absolute value; `huber`, quadratic up to `delta`
            and linear beyond.
        delta: in standard deviations.
    Raises:
        ValueError: an unknown penalty, or a delta that is not positive.
    """

    kinds = ("regression",)

    def __init__(self, penalty: str = "huber", delta: float = 1.0) -> None:
        super().__init__()
        if penalty not in _PENALTIES:
            raise ValueError(f"penalty must be one of {', '.join(_PENALTIES)}, got {penalty}")
        if type(delta) not in (int, float) or not 0 < delta < math.inf:
            raise ValueError(f"delta must be a positive number, got {delta}")
        self.penalty = penalty
        self.delta = float(delta)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        outputs = outputs.float()
        target = target.float()
        _check_shapes(outputs, target)
        if self.penalty == "huber":
            return F.huber_loss(outputs, target, delta=self.delta)
        if self.penalty == "mse":
            return F.mse_loss(outputs, target)
        return F.l1_loss(outputs, target)


def _check_shapes(outputs: Tensor, target: Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape != target.shape:
        raise ValueError(
            "needs image-level outputs and targets of one shape (batch, outputs), got "
            f"{tuple(outputs.shape)} and {tuple(target.shape)}"
        )


def _list_of_weights(
    class_weights: str | Sequence[float] | None,
    exclusive: bool,
    class_counts: Sequence[int] | None,
    num_cases: int | None,
) -> list[float] | None:
    """One weight per output; None: all are equal. Raises: ValueError: as in `CrossEntropy`."""
    if class_weights is None or class_weights == "none":
        return None
    if class_weights == "balanced":
        return _balanced(exclusive, class_counts, num_cases)
    is_list = not isinstance(class_weights, str)
    if not is_list or not all(map(is_weight, class_weights)) or not any(class_weights):
        raise ValueError(
            f"class_weights must be none, balanced, or numbers of 0 or more, got {class_weights}"
        )
    return [float(weight) for weight in class_weights]


def _balanced(exclusive: bool, class_counts: Sequence[int] | None, num_cases: int | None) -> list[float]:
    counts = class_counts or ()
    total = num_cases or sum(counts)
    every_class_has_cases = bool(counts) and all(counts)
    some_cases_lack_label = exclusive or max(counts, default=0) < total
    if not every_class_has_cases or not some_cases_lack_label:
        need = "training cases of each class" if exclusive else "training cases with and without each label"
        raise ValueError(f"class_weights=balanced needs {need}, got {class_counts} of {total}")
    if exclusive:
        return [total / (len(counts) * count) for count in counts]
    # Binary cross-entropy weighs the positive samples only
    return [(total - count) / count for count in counts]
