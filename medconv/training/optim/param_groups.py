"""Parameter groups: a learning rate multiplier per layer."""

import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer


def with_lr_multipliers(
    make_optimizer: Callable[..., Optimizer], network: nn.Module, multipliers: Mapping[str, float]
) -> Callable[..., Optimizer]:
    """Like `make_optimizer`, but the optimizer has a parameter group for each learning rate multiplier.

    It works with any optimizer and schedule: groups store their factor as `lr_multiplier`, and a schedule
    takes their learning rates as base.

    Args:
        make_optimizer: takes parameters.
        network: has the parameters' names.
        multipliers: regular expression on parameter names to factor; the first match counts, else 1.
    """
    if not multipliers:
        return make_optimizer

    def make_grouped_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        # Looked up here, since FSDP replaces the parameters
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        groups: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            multiplier = _multiplier(names.get(id(parameter)), multipliers)
            groups.setdefault(multiplier, []).append(parameter)
        optimizer = make_optimizer(
            [{"params": group, "lr_multiplier": multiplier} for multiplier, group in groups.items()]
        )
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_multiplier"]
        return optimizer

    return make_grouped_optimizer


def _multiplier(name: str | None, multipliers: Mapping[str, float]) -> float:
    """Args: name: of a parameter; None: it is not one of the network, such as a head's."""
    if name is not None:
        for pattern, multiplier in multipliers.items():
            if re.search(pattern, name):
                return multiplier
    return 1.0
