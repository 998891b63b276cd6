"""Regression outputs in physical units (mm, years, percent) from a network trained on standardised values."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


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
    network_class: Any = type(network)
    network.__class__ = _with_units(network_class)
    return network


class _InUnits(nn.Module):
    """Mixed into a network's class, so that its children, `deepcopy` and pickling stay as they were."""

    value_means: Tensor
    value_stds: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        return output.float() * self.value_stds + self.value_means

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle finds no class that was made here, but it finds the network's
        _, network_class = type(self).__bases__
        return _blank, (network_class,), self.__dict__


@cache
def _with_units(network_class: type) -> Any:
    """The subclass of a network's class, created once."""
    return type(network_class.__name__, (_InUnits, network_class), {})


def _blank(network_class: type) -> Any:
    """For copying and unpickling: an empty module, whose state is set afterwards."""
    mixed_class = _with_units(network_class)
    return mixed_class.__new__(mixed_class)
