"""Regression outputs in physical units (mm, years, percent) from a network trained on standardised values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def in_units(network: nn.Module, means: Sequence[float], stds: Sequence[float]) -> nn.Module:
    """Change a network in place so that it returns `stds * output + means`, always in float32.

    The network gets a subclass of its own class, so parameter names stay; means and stds are not in its state
    dict.
    Shape: outputs (batch, values); one mean and one standard deviation per value.
    """
    network.register_buffer("value_means", torch.tensor(means, dtype=torch.float32), persistent=False)
    network.register_buffer("value_stds", torch.tensor(stds, dtype=torch.float32), persistent=False)
    network.__class__ = _with_units(type(network))
    return network


class _InUnits(nn.Module):
    value_means: Tensor
    value_stds: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super().forward(*args, **kwargs)
        return output.float() * self.value_stds + self.value_means

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self).__bases__[1],), self.__dict__


def _with_units(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a module class, created once."""
    if kind not in _KINDS:
        _KINDS[kind] = type(kind.__name__, (_InUnits, kind), {})
    return _KINDS[kind]


def _blank(kind: type[nn.Module]) -> nn.Module:
    """For copying and unpickling: an empty module, whose state is set afterwards."""
    mixed = _with_units(kind)
    return mixed.__new__(mixed)
