"""Running statistics of batch norms: restore them after a skipped step, or keep them fixed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Those of a network, which a forward pass changes before its loss is known to be finite."""

    def __init__(self, module: nn.Module) -> None:
        norms = [part for part in module.modules() if isinstance(getattr(part, "running_mean", None), Tensor)]
        values: Any = [value for norm in norms for value in (norm.running_mean, norm.running_var)]
        counts: Any = [norm.num_batches_tracked for norm in norms]
        self._groups: list[list[Tensor]] = [values, counts] if norms else []

    def now(self) -> list[Tensor]:
        """A copy of all running statistics."""
        return [_flat(group) for group in self._groups]

    def restore(self, saved: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Restore what `now` returned. Args: where: a bool tensor on the device, whether to; None: yes."""
        for group, old in zip(self._groups, saved, strict=True):
            restored = old if where is None else torch.where(where, old, _flat(group))
            parts = restored.split([value.numel() for value in group])
            torch._foreach_copy_(group, [part.view_as(v) for part, v in zip(parts, group, strict=True)])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class _Fixed(nn.Module):
    """Mixed into a norm's class: it always stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def fix_statistics(norm: nn.Module) -> None:
    """Make a norm use its running statistics in training too, in place; its parameters stay."""
    if not isinstance(norm, _Fixed):
        norm.__class__ = type(f"Fixed{type(norm).__name__}", (_Fixed, type(norm)), {})
    norm.eval()
