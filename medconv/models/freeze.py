"""Frozen parameters and learning-rate multipliers, by regular expressions on parameter names."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from medconv.models.mixin import Mixin, mixed
from medconv.utils.errors import Argument, ArgumentError

_SUGGESTIONS = 3  # most similar names in a message
_SIMILARITY = 0.5  # of `difflib`, from 0 to 1
_EXAMPLES = 5  # modules in a message where no name is similar


@dataclass(frozen=True)
class FrozenPart:
    """Parameters that are not trained, by name, and the batch norms of which nothing is."""

    parameters: dict[str, nn.Parameter]
    norms: tuple[nn.Module, ...]


def freeze(network: nn.Module, patterns: Sequence[str]) -> str:
    """Freeze parameters whose name a pattern matches (`re.search`); returns a line with their number.

    A batch norm whose parameters are all frozen uses its running statistics in training too.

    Raises:
        ArgumentError: as `frozen_part`.
    """
    frozen = frozen_part(network, patterns)
    for parameter in frozen.parameters.values():
        parameter.requires_grad_(False)
    for norm in frozen.norms:
        fix_statistics(norm)
    return description(frozen, network)


class _Fixed(Mixin):
    """Mixed into a norm's class: it always stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def fix_statistics(norm: nn.Module) -> None:
    """Make a norm use its running statistics in training too, in place; its parameters stay."""
    if not isinstance(norm, _Fixed):
        norm.__class__ = mixed(_Fixed, norm)
    norm.eval()


def has_fixed_norms(network: nn.Module) -> bool:
    """Whether `fix_statistics` holds for a norm in there."""
    return any(isinstance(module, _Fixed) for module in network.modules())


def frozen_part(network: nn.Module, patterns: Sequence[str]) -> FrozenPart:
    """The parameters whose name a pattern matches (`re.search`), and those that are frozen already.

    Raises:
        ArgumentError: a pattern is no regular expression or matches nothing, or nothing is left to train.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(
            "freeze", f" must be a list of regular expressions, such as [encoder], got {patterns}"
        )
    parameters = dict(network.named_parameters())
    names = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    for pattern in patterns:
        names.update(_matching_names("freeze", pattern, parameters))
    if len(names) == len(parameters):
        raise ArgumentError(
            "freeze", f"={list(patterns)} freezes the whole network, nothing is left to train"
        )
    frozen = {name: parameter for name, parameter in parameters.items() if name in names}
    # after all patterns, since several may freeze one norm
    frozen_ids = {id(parameter) for parameter in frozen.values()}
    norms = [
        module
        for name, module in network.named_modules()
        if _has_fixed_statistics(name, module, patterns, frozen_ids)
    ]
    return FrozenPart(frozen, tuple(norms))


def description(frozen: FrozenPart, network: nn.Module) -> str:
    """How much of a network is frozen."""
    parameters = dict(network.named_parameters())
    frozen_millions = _millions(frozen.parameters.values())
    total_millions = _millions(parameters.values())
    line = f"{len(frozen.parameters)} of {len(parameters)} parameters"
    line += f", {frozen_millions:.3g} of {total_millions:.3g} million weights"
    if frozen.norms:
        line += f", and the statistics of {len(frozen.norms)} batch norms"
    return line


def _millions(parameters: Iterable[Tensor]) -> float:
    return sum(parameter.numel() for parameter in parameters) / 1e6


def _has_fixed_statistics(
    name: str, module: Any, patterns: Sequence[str], frozen_ids: Collection[int]
) -> bool:
    """Whether a module keeps running statistics and nothing else of it is trained.

    Args: frozen_ids: `id` of each frozen parameter.
    """
    if not isinstance(getattr(module, "running_mean", None), Tensor):
        return False
    scale_and_shift = list(module.parameters(recurse=False))
    if not scale_and_shift:  # then its statistics are what a pattern must match
        return any(re.search(pattern, f"{name}.running_mean") for pattern in patterns)
    return all(id(parameter) in frozen_ids for parameter in scale_and_shift)


def check_factors(factors: Mapping[str, float], network: nn.Module) -> None:
    """Check learning rate multipliers, regular expressions to factors.

    Raises:
        ArgumentError: a pattern that matches nothing, a factor that is not positive.
    """
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    for pattern, factor in factors.items():
        if not 0 < factor < float("inf"):
            raise ArgumentError(
                "lr_multipliers",
                f": {pattern!r} must have a positive factor, got {factor}; to freeze it, use ",
                Argument("freeze"),
            )
        _matching_names("lr_multipliers", pattern, trained)


def _matching_names(argument: str, pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches.

    Raises:
        ArgumentError: none; the message has the most similar names.
    """
    try:
        matches = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ArgumentError(argument, f": {pattern!r} is not a regular expression: {error}") from error
    if not matches:
        suggestions = ", ".join(_suggestions(pattern, names))
        raise ArgumentError(argument, f": {pattern!r} matches no parameter to train; there are {suggestions}")
    return matches


def _suggestions(pattern: str, names: Iterable[str]) -> list[str]:
    """Modules and parameters whose names are like a pattern, or the first modules."""
    prefixes: dict[str, None] = {}  # a set that keeps its order: `a`, `a.b` and `a.b.c` of `a.b.c`
    for name in names:
        prefixes |= dict.fromkeys(accumulate(name.split("."), "{}.{}".format))
    text = pattern.strip("^$").replace("\\", "")
    similar = get_close_matches(text, list(prefixes), _SUGGESTIONS, _SIMILARITY)
    return similar or [name for name in prefixes if "." not in name][:_EXAMPLES]
