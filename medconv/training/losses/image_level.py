"""Losses for image-level targets: outputs and targets both have the shape (batch, outputs)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.targets.image_level import ImageLevelTargets

Loss = Callable[[Tensor, Tensor], Tensor]
_RECOMMENDED = {  # options of `loss`
    "multiclass": "cross_entropy",
    "multilabel": "bce",
    "regression": "huber, mse or l1",
}
_TORCH_LOSSES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.CrossEntropyLoss: ("multiclass",),
    nn.BCEWithLogitsLoss: ("multilabel",),
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss), ("regression",)),
}
_TRIAL_SAMPLES = 6  # a loss is tried on so many random samples
_TOLERANCE = 1e-4  # relative difference allowed between a loss and the mean of its samples' losses
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


class ImageLevelLoss(nn.Module):
    """Any loss, adapted to image-level targets: encodes labels as targets and checks that the loss fits.

    Regression values are standardised by mean and standard deviation of the training cases, so that a
    loss does not depend on their units. The network's outputs are in these units.
    Shape: outputs (batch, image_targets.num_outputs), target of the same shape, as returned by `target` or
        mixed from several -> scalar.
    Args: means, stds: of each value over the training cases; for regression only.
    Raises: ValueError: the loss is for other targets, or cannot take these outputs.
    """

    means: Tensor
    stds: Tensor

    def __init__(
        self,
        loss: Loss,
        image_targets: ImageLevelTargets,
        means: Sequence[float] | None = None,
        stds: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.loss, self.image_targets = loss, image_targets
        numbers = image_targets.kind == "regression"
        for name, values, otherwise in (("means", means, 0.0), ("stds", stds, 1.0)):
            filled = values if numbers and values is not None else [otherwise] * image_targets.num_outputs
            self.register_buffer(name, torch.tensor(filled, dtype=torch.float32), persistent=False)
        if problem := self._problem():
            raise problem

    def target(self, label: Tensor) -> Tensor:
        """What the loss compares outputs with: probabilities of classes or labels, or standardised values.

        Shape: label (batch, image_targets.num_values) -> (batch, image_targets.num_outputs).
        """
        if self.image_targets.kind == "multiclass":
            return F.one_hot(label[:, 0].long(), self.image_targets.num_outputs).float()
        return self._standardised(label.float())

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.loss(self._standardised(outputs), target)

    def _standardised(self, values: Tensor) -> Tensor:
        return (
            (values.float() - self.means) / self.stds if self.image_targets.kind == "regression" else values
        )

    def _problem(self) -> ValueError | None:
        """Why the loss does not fit: it is for other targets, fails on such outputs, or is no mean over
        samples. None: it fits.
        """
        name, kind = getattr(self.loss, "__name__", type(self.loss).__name__), self.image_targets.kind
        advice = f"use loss={_RECOMMENDED[kind]}"
        kinds = getattr(self.loss, "kinds", None) or _TORCH_LOSSES.get(type(self.loss))  # type: ignore[arg-type]
        if kinds is not None and kind not in kinds:
            return ValueError(
                f"loss: {name} is for {' and '.join(kinds)} targets, but the data has {kind} targets; "
                f"{advice}"
            )
        try:
            of_batch, of_samples = self._trial_losses()
        except (
            torch.OutOfMemoryError
        ):  # not the loss's fault; if it lasts, the first training step reports it
            return None
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if reason.startswith("loss."):  # our own messages begin with the config key
                return ValueError(reason)
            problem = ValueError(f"loss: {name} cannot take image-level {kind} targets: {reason}; {advice}")
            problem.__cause__ = error
            return problem
        if not math.isfinite(of_batch):
            return ValueError(
                f"loss: {name} is {of_batch} for {kind} targets, expected a finite number; {advice}"
            )
        if abs(of_batch - of_samples) <= _TOLERANCE * max(abs(of_batch), _TOLERANCE):
            return None
        return ValueError(
            f"loss: {name} is not a mean over samples, as a loss for image-level {kind} targets must be; "
            f"{advice}"
        )

    def _trial_losses(self) -> tuple[float, float]:
        """The loss of a batch of random numbers, and the mean of the losses of its samples."""
        generator, size = torch.Generator().manual_seed(0), (_TRIAL_SAMPLES, self.image_targets.num_outputs)
        values = (_TRIAL_SAMPLES, self.image_targets.num_values)
        label: Any = torch.randint(2, values, generator=generator).float()
        outputs, target = torch.randn(size, generator=generator) * self.stds + self.means, self.target(label)
        with torch.no_grad():
            of_batch = float(self(outputs, target))
            each = [float(self(outputs[i : i + 1], target[i : i + 1])) for i in range(_TRIAL_SAMPLES)]
        return of_batch, sum(each) / _TRIAL_SAMPLES


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
