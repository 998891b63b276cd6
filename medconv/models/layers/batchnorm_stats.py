"""Running statistics of batch norms: restore them after a skipped step, or keep them fixed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Those of a network, which a forward pass changes before its loss is known to be finite."""

    def __init__(self, module: nn.Module) -> None:
        # Tensors of one type are copied together; the counts of batches are whole numbers.
        means_and_variances: list[Tensor] = []
        counts: list[Tensor] = []
        layers: Any = module.modules()
        for layer in layers:
            if isinstance(getattr(layer, "running_mean", None), Tensor):
                means_and_variances += [layer.running_mean, layer.running_var]
                counts.append(layer.num_batches_tracked)
        self._groups = [means_and_variances, counts] if counts else []

    def now(self) -> list[Tensor]:
        """A copy of all running statistics, one tensor per type: few launches on a GPU."""
        return [torch.cat([each.detach().reshape(-1) for each in group]) for group in self._groups]

    def restore(self, saved: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Restore what `now` returned.

        Args:
            saved: from `now`.
            where: a bool tensor on the device, whether to, so that nothing waits for the device; None: yes.
        """
        if where is not None:
            saved = [torch.where(where, old, new) for old, new in zip(saved, self.now(), strict=True)]
        for group, restored in zip(self._groups, saved, strict=True):
            sizes = [value.numel() for value in group]
            shaped = []
            for piece, value in zip(restored.split(sizes), group, strict=True):
                shaped.append(piece.view_as(value))
            # one launch for all of them
            torch._foreach_copy_(group, shaped)


class _Fixed(nn.Module):
    """Mixed into a norm's class: it always stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def fix_statistics(norm: nn.Module) -> None:
    """Make a norm use its running statistics in training too, in place; its parameters stay."""
    if not isinstance(norm, _Fixed):
        norm.__class__ = type(f"Fixed{type(norm).__name__}", (_Fixed, type(norm)), {})
    norm.eval()
