"""Parameter groups: a learning rate multiplier per layer."""

import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer


def with_lr_multipliers(
    make: Callable[..., Optimizer], network: nn.Module, factors: Mapping[str, float]
) -> Callable[..., Optimizer]:
    """Like `make`, but the optimizer has a parameter group for each learning rate multiplier.

    It works with any optimizer and schedule: groups store their factor as `lr_multiplier`, and a schedule
    takes their learning rates as base.
    Args: factors: regular expression on parameter names to factor; the first match counts, else 1.
    """

    def made(parameters: Iterable[nn.Parameter]) -> Optimizer:
        # looked up here, since FSDP replaces the parameters
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            name = names.get(id(parameter))
            matching = (
                factor for pattern, factor in factors.items() if name is not None and re.search(pattern, name)
            )
            groups.setdefault(next(matching, 1.0), []).append(parameter)
        optimizer = make([{"params": group, "lr_multiplier": factor} for factor, group in groups.items()])
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_multiplier"]
        return optimizer

    return made if factors else make
