"""Losses of whole images: outputs (batch, outputs) and what they are compared with, of the same shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.targets.image_level import ImageLevelTargets

Loss = Callable[[Tensor, Tensor], Tensor]
_FITTING = {
    "multiclass": "cross_entropy",
    "multilabel": "bce",
    "regression": "huber, mse or l1",
}  # options of `loss`
_OF_TORCH: dict[type[nn.Module], tuple[str, ...]] = {
    nn.CrossEntropyLoss: ("multiclass",),
    nn.BCEWithLogitsLoss: ("multilabel",),
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss), ("regression",)),
}
_FEW, _ALIKE = 6, 1e-4  # samples that a loss is tried on; how far, relative, it may be from a mean over them
_DEVIATIONS = ("mse", "l1", "huber")


class CrossEntropy(nn.Module):
    """Cross-entropy of classes that exclude each other, or, summed over two answers each, of findings.

    Weights do not divide it: it is a mean over samples, so that several devices, and accumulated batches,
    have the gradient of one. The mean of `balanced` weights over the training cases is 1.

    Shape: logits (batch, outputs), target the same: the share of each class, or of each finding -> scalar, in
    fp32.
    Args:
        exclusive: classes; else findings.
        label_smoothing: share of the target that is spread over all answers.
        class_weights: `none`, `balanced`, or a number for each: of a class, what its samples count; of a
            finding, what the samples that have it count. Balanced are all classes alike, and the samples with
            a finding and without.
        class_counts, num_cases: training cases of each class or finding, and all of them; for `balanced`.
    Raises: ValueError: values out of range, or `balanced` without counts or with a class that is in no case.
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
        _need_alike(logits, target)
        if weights is not None and len(weights) != logits.shape[1]:
            raise ValueError(
                f"loss.class_weights must be {logits.shape[1]} numbers, one for each, got {len(weights)}"
            )
        if self.exclusive:
            return F.cross_entropy(logits, target, weights, label_smoothing=self.label_smoothing)
        target = target * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=weights)


class RegressionLoss(nn.Module):
    """How far numbers are from what they should be, of standardised ones; the mean over samples and names.

    Shape: outputs (batch, numbers), target the same -> scalar, in fp32.
    Args: of: `mse`, the square; `l1`, the absolute value; `huber`, a square up to `delta` and straight from
    there on.
    Raises: ValueError: another name, or a delta that is not positive.
    """

    kinds = ("regression",)

    def __init__(self, of: str = "huber", delta: float = 1.0) -> None:
        super().__init__()
        if of not in _DEVIATIONS:
            raise ValueError(f"loss.of must be one of {', '.join(_DEVIATIONS)}, got {of}")
        if type(delta) not in (int, float) or not 0 < delta < math.inf:
            raise ValueError(f"loss.delta must be a positive number, got {delta}")
        self.of, self.delta = of, float(delta)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        outputs, target = outputs.float(), target.float()
        _need_alike(outputs, target)
        if self.of == "huber":
            return F.huber_loss(outputs, target, delta=self.delta)
        return F.mse_loss(outputs, target) if self.of == "mse" else F.l1_loss(outputs, target)


class ImageLevelLoss(nn.Module):
    """A loss that fits an outcome, with what it compares outputs with.

    Numbers are standardised by mean and standard deviation of the training cases, so that a loss means the
    same whatever their units, which the network's outputs have.
    Shape: outputs (batch, image_targets.num_outputs), target as `target` gives it, or weighted means of such
    -> scalar.
    Args: means, stds: of each number over the training cases; not for classes and findings.
    Raises: ValueError: the loss cannot take such outputs, or is another kind's.
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
            known = values if numbers and values is not None else [otherwise] * image_targets.num_outputs
            self.register_buffer(name, torch.tensor(known, dtype=torch.float32), persistent=False)
        if refused := self._refused():
            raise refused

    def target(self, label: Tensor) -> Tensor:
        """Shape: label (batch, image_targets.num_values) -> (batch, image_targets.num_outputs), shares or
        standardised numbers.
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

    def _refused(self) -> ValueError | None:
        """What speaks against the loss: it is another kind's, does not take such outputs, or is no mean
        over samples.
        """
        name, kind = getattr(self.loss, "__name__", type(self.loss).__name__), self.image_targets.kind
        advice = f"take loss={_FITTING[kind]}"
        kinds = getattr(self.loss, "kinds", None) or _OF_TORCH.get(type(self.loss))  # type: ignore[arg-type]
        if kinds is not None and kind not in kinds:
            return ValueError(f"loss: {name} is for {' and '.join(kinds)}, and the data has {kind}; {advice}")
        try:
            found, alone = self._tried()
        except torch.OutOfMemoryError:  # no fault of the loss; if it lasts, the first step says what helps
            return None
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            if told.startswith("loss."):  # our own messages begin with the key at fault
                return ValueError(told)
            refused = ValueError(f"loss: {name} cannot take {kind} of whole images: {told}; {advice}")
            refused.__cause__ = error
            return refused
        if not math.isfinite(found):
            return ValueError(f"loss: {name} is {found} for {kind}, expected a finite number; {advice}")
        if abs(found - alone) <= _ALIKE * max(abs(found), _ALIKE):
            return None
        return ValueError(
            f"loss: {name} is no mean over samples, as one for whole images is ({kind}); {advice}"
        )

    def _tried(self) -> tuple[float, float]:
        """The loss of a batch of random numbers, and the mean of what it is for each sample alone."""
        draw, size = torch.Generator().manual_seed(0), (_FEW, self.image_targets.num_outputs)
        label: Any = torch.randint(2, (_FEW, self.image_targets.num_values), generator=draw).float()
        outputs, target = torch.randn(size, generator=draw) * self.stds + self.means, self.target(label)
        with torch.no_grad():
            found = float(self(outputs, target))
            alone = [float(self(outputs[i : i + 1], target[i : i + 1])) for i in range(_FEW)]
        return found, sum(alone) / _FEW


def _need_alike(outputs: Tensor, target: Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape != target.shape:
        got = f"{tuple(outputs.shape)} and {tuple(target.shape)}"
        raise ValueError(f"needs outputs and targets (batch, outputs), of whole images, got {got}")


def _weights(
    wanted: str | Sequence[float] | None, exclusive: bool, counts: Sequence[int] | None, num_cases: int | None
) -> list[float] | None:
    """Raises: ValueError: as of `CrossEntropy`."""
    if wanted is None or wanted == "none":
        return None
    if wanted == "balanced":
        return _balanced(exclusive, counts, num_cases)
    if (
        isinstance(wanted, str)
        or not all(type(w) in (int, float) and 0 <= w < math.inf for w in wanted)
        or not any(wanted)
    ):
        raise ValueError(f"loss.class_weights must be none, balanced, or numbers of 0 or more, got {wanted}")
    return [float(weight) for weight in wanted]


def _balanced(exclusive: bool, counts: Sequence[int] | None, num_cases: int | None) -> list[float]:
    total = num_cases or sum(counts or ())
    if not counts or not all(counts) or (not exclusive and max(counts) >= total):
        wanted = (
            "training cases of each class" if exclusive else "training cases with each finding and without"
        )
        raise ValueError(f"loss.class_weights=balanced needs {wanted}, got {counts} of {total}")
    return [total / (len(counts) * n) if exclusive else (total - n) / n for n in counts]
