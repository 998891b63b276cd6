"""Frozen parameters and learning-rate multipliers, by regular expressions on parameter names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, chain
from typing import Any

from torch import Tensor, nn

from medconv.config import ConfigError
from medconv.models.layers.batchnorm_stats import fix_statistics


def freeze(network: nn.Module, patterns: Sequence[str]) -> str:
    """Freeze parameters whose name a pattern matches (`re.search`); returns a line with their number.

    A batch norm whose parameters are all frozen uses its running statistics in training too.
    Raises: ConfigError: a pattern is no regular expression or matches nothing, or nothing is left to train.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        need = "a list of regular expressions, such as [encoder]"
        raise ConfigError(f"init.freeze must be {need}, got {patterns}")
    parameters = dict(network.named_parameters())
    for pattern in patterns:
        for name in _matching_names("init.freeze", pattern, parameters):
            parameters[name].requires_grad_(False)
    frozen = [p for p in parameters.values() if not p.requires_grad]
    if len(frozen) == len(parameters):
        raise ConfigError(f"init.freeze={list(patterns)} freezes the whole network, nothing is left to train")
    norms = [module for name, module in network.named_modules() if _is_fixed(name, module, patterns)]
    for norm in norms:
        fix_statistics(norm)
    weights, total = (sum(p.numel() for p in group) / 1e6 for group in (frozen, parameters.values()))
    numbers = f"{len(frozen)} of {len(parameters)} parameters, {weights:.3g} of {total:.3g} million weights"
    return f"init.freeze: {numbers}" + (f", and the statistics of {len(norms)} batch norms" if norms else "")


def _is_fixed(name: str, module: Any, patterns: Sequence[str]) -> bool:
    if not isinstance(getattr(module, "running_mean", None), Tensor):
        return False
    own = list(module.parameters(recurse=False))
    if not own:  # without scale and shift
        return any(re.search(pattern, f"{name}.running_mean") for pattern in patterns)
    return not any(p.requires_grad for p in own)


def check_factors(factors: Mapping[str, float], network: nn.Module) -> None:
    """Check `init.lr_multipliers`. Raises: ConfigError: a pattern that matches nothing, a factor below 0."""
    names = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    for pattern, factor in factors.items():
        if not 0 < factor < float("inf"):
            need = f"{pattern!r} must have a positive factor, got {factor}; to freeze it, use init.freeze"
            raise ConfigError(f"init.lr_multipliers: {need}")
        _matching_names("init.lr_multipliers", pattern, names)


def _matching_names(key: str, pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches. Raises: ConfigError: none; names the most similar ones."""
    try:
        matches = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ConfigError(f"{key}: {pattern!r} is not a regular expression: {error}") from error
    if not matches:
        parts = (accumulate(name.split("."), "{}.{}".format) for name in names)
        modules = list(dict.fromkeys(chain.from_iterable(parts)))
        near = get_close_matches(pattern.strip("^$").replace("\\", ""), modules, 3, 0.5)
        shown = ", ".join(near or [name for name in modules if "." not in name][:5])
        raise ConfigError(f"{key}: {pattern!r} matches no parameter to train; there are {shown}")
    return matches
