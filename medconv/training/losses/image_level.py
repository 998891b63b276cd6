"""Losses for image-level targets: outputs and targets both have the shape (batch, outputs)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_PENALTIES = ("mse", "l1", "huber")


class CrossEntropy(nn.Module):
    """Cross-entropy for multiclass targets, or binary cross-entropy of each label for multilabel targets.

    The loss is a mean over samples and is not divided by the sum of the class weights. So several devices,
    or accumulated batches, have the gradient of one large batch. The mean of `balanced` weights over the
    training cases is 1.

    Shape: logits (batch, outputs), target (batch, outputs): probability of each class or label -> scalar,
        computed in fp32.
    Args:
        exclusive: true for multiclass, false for multilabel.
        label_smoothing: share of the target that is spread evenly over all classes, or over present and
            absent.
        class_weights: `none`, `balanced`, or one number per output. A number multiplies the loss of a
            class's samples; for a label, that of the samples that have it. `balanced` gives all classes
            the same total weight, and so the samples with and without a label.
        class_counts, num_cases: training cases of each class or label, and of all; for `balanced`.
    Raises: ValueError: values out of range; `balanced` without counts or with a class that has no case.
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
            raise ValueError(
                f"loss.label_smoothing must be a number from 0 to below 1, got {label_smoothing}"
            )
        self.exclusive, self.label_smoothing = exclusive, float(label_smoothing)
        weights = _weights(class_weights, exclusive, class_counts, num_cases)
        self.register_buffer("weights", None if weights is None else torch.tensor(weights), persistent=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("multiclass",) if self.exclusive else ("multilabel",)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        logits, target, weights = logits.float(), target.float(), self.weights
        _check_shapes(logits, target)
        if weights is not None and len(weights) != logits.shape[1]:
            raise ValueError(
                f"loss.class_weights must be {logits.shape[1]} numbers, one per output, got {len(weights)}"
            )
        if self.exclusive:
            return F.cross_entropy(logits, target, weights, label_smoothing=self.label_smoothing)
        target = target * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=weights)


class RegressionLoss(nn.Module):
    """Regression loss of standardised values: the mean over samples and outputs.

    Shape: outputs (batch, values), target (batch, values) -> scalar, computed in fp32.
    Args:
        penalty: of an error: `mse`, its square; `l1`, its absolute value; `huber`, quadratic up to `delta`
            and linear beyond.
        delta: in standard deviations.
    Raises: ValueError: an unknown penalty, or a delta that is not positive.
    """

    kinds = ("regression",)

    def __init__(self, penalty: str = "huber", delta: float = 1.0) -> None:
        super().__init__()
        if penalty not in _PENALTIES:
            raise ValueError(f"loss.penalty must be one of {', '.join(_PENALTIES)}, got {penalty}")
        if type(delta) not in (int, float) or not 0 < delta < math.inf:
            raise ValueError(f"loss.delta must be a positive number, got {delta}")
        self.penalty, self.delta = penalty, float(delta)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        outputs, target = outputs.float(), target.float()
        _check_shapes(outputs, target)
        if self.penalty == "huber":
            return F.huber_loss(outputs, target, delta=self.delta)
        return F.mse_loss(outputs, target) if self.penalty == "mse" else F.l1_loss(outputs, target)


def _check_shapes(outputs: Tensor, target: Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape != target.shape:
        got = f"{tuple(outputs.shape)} and {tuple(target.shape)}"
        raise ValueError(f"needs image-level outputs and targets of one shape (batch, outputs), got {got}")


def _weights(
    setting: str | Sequence[float] | None,
    exclusive: bool,
    counts: Sequence[int] | None,
    num_cases: int | None,
) -> list[float] | None:
    """The weights that `class_weights` means. Raises: ValueError: as in `CrossEntropy`."""
    if setting is None or setting == "none":
        return None
    if setting == "balanced":
        return _balanced(exclusive, counts, num_cases)
    if (
        isinstance(setting, str)
        or not all(type(w) in (int, float) and 0 <= w < math.inf for w in setting)
        or not any(setting)
    ):
        raise ValueError(f"loss.class_weights must be none, balanced, or numbers of 0 or more, got {setting}")
    return [float(weight) for weight in setting]


def _balanced(exclusive: bool, counts: Sequence[int] | None, num_cases: int | None) -> list[float]:
    total = num_cases or sum(counts or ())
    if not counts or not all(counts) or (not exclusive and max(counts) >= total):
        need = "training cases of each class" if exclusive else "training cases with and without each label"
        raise ValueError(f"loss.class_weights=balanced needs {need}, got {counts} of {total}")
    return [total / (len(counts) * n) if exclusive else (total - n) / n for n in counts]
