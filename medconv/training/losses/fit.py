"""Adapts any loss to the run's targets, and checks that it and its arguments fit them."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.models.outputs import heads
from medconv.targets import Targets
from medconv.utils.errors import first_line

# Kinds of targets that torch's losses are for. Ours, and those of users, have an attribute `kinds`.
_KINDS_OF_TORCH_LOSSES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.CrossEntropyLoss: ("label_map", "soft", "multiclass"),
    nn.BCEWithLogitsLoss: ("regions", "multilabel"),
    nn.MSELoss: ("regression",),
    nn.L1Loss: ("regression",),
    nn.HuberLoss: ("regression",),
    nn.SmoothL1Loss: ("regression",),
}


# MONAI's losses of overlap, which also take any numbers for masks
_OF_OVERLAP = re.compile("Dice|Tversky|Focal")
_KINDS_OF_OVERLAP = ("label_map", "regions", "soft", "multiclass", "multilabel")


class LossArgumentError(ValueError):
    """An argument of a loss does not fit the outputs that the loss is called with; the message names it."""


def is_weight(value: Any) -> bool:
    """Whether a value is a finite number of 0 or more; neither a boolean nor a string."""
    return type(value) in (int, float) and 0 <= value < math.inf


class FittedLoss(nn.Module):
    """The loss of a network's outputs. Under deep supervision each coarser head has half the weight.

    Shape:
        outputs (batch, outputs, *spatial) or (batch, outputs), or several heads, finest first;
        encoded: as `targets.encode` returns it, resized to the size of each head -> scalar.
    Args:
        loss: (outputs, reference) -> scalar; its attribute `kinds`, if it has one, names the kinds of
            targets that it is for.
        targets: encode labels, and apply the loss.
        spatial_dims: 2 or 3.
    Raises:
        ValueError: the loss is for other targets, fails on such outputs, or is refused by
            `targets.try_loss`.
    Source: weights of heads as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    def __init__(self, loss: Any, targets: Targets, spatial_dims: int) -> None:
        super().__init__()
        self.loss = loss
        self.targets = targets
        self.spatial_dims = spatial_dims
        self._name = getattr(loss, "__name__", type(loss).__name__)
        kinds = getattr(loss, "kinds", None) or _KINDS_OF_TORCH_LOSSES.get(type(loss))
        if kinds is None and type(loss).__module__.startswith("monai.") and _OF_OVERLAP.search(self._name):
            kinds = _KINDS_OF_OVERLAP
        if kinds is not None and not {targets.kind, *targets.loss_kinds} & set(kinds):
            raise ValueError(
                f"loss: {self._name} is for {' and '.join(kinds)} targets, but the data has "
                f"{targets.kind} targets; {self._advice()}"
            )
        # Random outputs and labels, before anything is trained
        try:
            with torch.no_grad():
                problem = targets.try_loss(loss, spatial_dims)
        except torch.OutOfMemoryError:  # no fault of the loss; if it lasts, the first step reports it
            problem = None
        except LossArgumentError as error:  # it says itself what is wrong
            raise ValueError(f"loss: {error}") from error
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"loss: {self._name} cannot take {targets.kind} targets: {first_line(error)}; "
                f"{self._advice()}"
            ) from error
        if problem:
            raise ValueError(f"loss: {self._name} {problem}; {self._advice()}")

    def forward(self, outputs: Any, encoded: Tensor, **further: Tensor) -> Tensor:
        """Args: further: `annotated` or `values`, as in `targets.compare`."""
        logits = heads(outputs, self.spatial_dims)
        self._check_heads(logits)
        weights = [0.5**level for level in range(len(logits))]
        losses = []
        for weight, head in zip(weights, logits, strict=True):
            reference = _resize(encoded, head.shape[2:])
            losses.append(weight * self.targets.compare(self.loss, head, reference, **further))
        return torch.stack(losses).sum() / sum(weights)

    def _check_heads(self, logits: Sequence[Tensor]) -> None:
        channels = self.targets.num_outputs
        axes = logits[0].ndim
        if all(head.ndim == axes and head.shape[1] == channels for head in logits):
            return
        shapes = ", ".join(str(tuple(head.shape)) for head in logits)
        raise ValueError(
            f"model returned outputs of shapes {shapes} in training; expected logits of {channels} channels "
            f"and {axes} axes, and nothing else, since further outputs are trained as heads of deep "
            "supervision"
        )

    def _advice(self) -> str:
        return f"use loss={self.targets.default_loss}"


def _resize(label: Tensor, size: Sequence[int]) -> Tensor:
    """The nearest labels at another size; of probabilities, the mean of the voxels that become one.

    Shape: (batch, channels, *spatial) -> (batch, channels, *size).
    """
    if label.shape[2:] == size:
        return label
    # Not torch's "nearest", which takes the first voxel of each block (pytorch#34808)
    mode = "area" if label.is_floating_point() else "nearest-exact"
    return F.interpolate(label.float(), list(size), mode=mode).to(label.dtype)
