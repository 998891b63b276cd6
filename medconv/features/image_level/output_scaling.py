"""Regression outputs in physical units (mm, years, percent) from a network trained on standardised values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medconv.models.mixin import Mixin, mixed


def in_units(network: nn.Module, means: Sequence[float], stds: Sequence[float]) -> nn.Module:
    """Change a network in place so that it returns `stds * output + means`, always in float32.

    The network gets a subclass of its own class, so parameter names stay; means and stds are not in its state
    dict.

    Shape:
        outputs (batch, values).
    Args:
        means: one per value, in its unit.
        stds: standard deviations, one per value, in its unit.
    """
    value_means = torch.tensor(means, dtype=torch.float32)
    value_stds = torch.tensor(stds, dtype=torch.float32)
    # not persistent: the checkpoint's targets hold them
    network.register_buffer("value_means", value_means, persistent=False)
    network.register_buffer("value_stds", value_stds, persistent=False)
    network.__class__ = mixed(_InUnits, network)
    return network


class _InUnits(Mixin):
    value_means: Tensor
    value_stds: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        return output.float() * self.value_stds + self.value_means
