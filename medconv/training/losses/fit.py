"""Adapts any loss to the run's targets, and checks that it fits them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.models.outputs import heads
from medconv.targets import Targets
from medconv.utils.errors import first_line

_TORCH_LOSSES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.CrossEntropyLoss: ("label_map", "multiclass"),
    nn.BCEWithLogitsLoss: ("regions", "multilabel"),
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss), ("regression",)),
}


class FittedLoss(nn.Module):
    """The loss of a network's outputs. Under deep supervision each coarser head has half the weight.

    Shape: outputs (batch, outputs, *spatial) or (batch, outputs), or several heads, finest first; encoded: as
        `targets.encode` returns it, resized to the size of each head -> scalar.
    Args: loss: (outputs, reference) -> scalar; its attribute `kinds`, if it has one, names the kinds of
        targets that it is for.
    Raises: ValueError: the loss is for other targets, fails on such outputs, or is refused by
        `targets.try_loss`.
    Source: weights of heads as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    def __init__(self, loss: Any, targets: Targets, spatial_dims: int) -> None:
        super().__init__()
        self.loss, self.targets, self.spatial_dims = loss, targets, spatial_dims
        self._check()

    def forward(self, outputs: Any, encoded: Tensor, annotated: Tensor | None = None) -> Tensor:
        """Args: annotated: as in `targets.compare`."""
        logits = heads(outputs, self.spatial_dims)
        self._check_heads(logits)
        weights = [0.5**i for i in range(len(logits))]
        known = () if annotated is None else (annotated,)
        losses = [
            weight * self.targets.compare(self.loss, output, _resize(encoded, output.shape[2:]), *known)
            for weight, output in zip(weights, logits, strict=True)
        ]
        return torch.stack(losses).sum() / sum(weights)

    def _check_heads(self, logits: Sequence[Tensor]) -> None:
        count, axes = self.targets.num_outputs, logits[0].ndim
        if all(each.ndim == axes and each.shape[1] == count for each in logits):
            return
        raise ValueError(
            f"model returned outputs of shapes {', '.join(str(tuple(each.shape)) for each in logits)} in "
            f"training; expected logits of {count} channels and {axes} axes, and nothing else, since further "
            "outputs are trained as heads of deep supervision"
        )

    def _check(self) -> None:
        name, kind = getattr(self.loss, "__name__", type(self.loss).__name__), self.targets.kind
        advice = f"use loss={self.targets.default_loss}"
        kinds = getattr(self.loss, "kinds", None) or _TORCH_LOSSES.get(type(self.loss))
        if kinds is not None and not {kind, *self.targets.loss_kinds} & set(kinds):
            raise ValueError(
                f"loss: {name} is for {' and '.join(kinds)} targets, but the data has {kind} targets; "
                f"{advice}"
            )
        try:
            with torch.no_grad():
                problem = self.targets.try_loss(self.loss, self.spatial_dims)
        except torch.OutOfMemoryError:  # no fault of the loss; if it lasts, the first step reports it
            return
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = first_line(error)
            if reason.startswith("loss."):  # our own messages begin with the config key
                raise ValueError(reason) from error
            raise ValueError(f"loss: {name} cannot take {kind} targets: {reason}; {advice}") from error
        if problem:
            raise ValueError(f"loss: {name} {problem}; {advice}")


def _resize(label: Tensor, size: Sequence[int]) -> Tensor:
    return label if label.shape[2:] == size else F.interpolate(label.float(), list(size)).to(label.dtype)
