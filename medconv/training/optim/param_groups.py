"""Parameter groups: a learning rate multiplier per layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer


def with_lr_multipliers(
    make: Callable[..., Optimizer], network: nn.Module, factors: Mapping[str, float]
) -> Callable[..., Optimizer]:
    """A function of parameters, as `make` is, in whose optimizers layers learn at rates of their own.

    Whatever the optimizer's class and the schedule: groups keep their factor as `lr_multiplier`, and a
    schedule takes their learning rates for its base.
    Args: factors: by regular expressions on names in the network; the first that is found in one counts, else
    1.
    """

    def made(parameters: Iterable[nn.Parameter]) -> Optimizer:
        names = {
            id(parameter): name for name, parameter in network.named_parameters()
        }  # by now, FSDP makes others
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            name = names.get(id(parameter))
            found = (
                factor for pattern, factor in factors.items() if name is not None and re.search(pattern, name)
            )
            groups.setdefault(next(found, 1.0), []).append(parameter)
        optimizer = make([{"params": found, "lr_multiplier": factor} for factor, found in groups.items()])
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_multiplier"]
        return optimizer

    return made if factors else make
