"""Errors about arguments of Python functions as errors about keys of the config."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import get_type_hints

from medconv.config.schema import RunConfig
from medconv.config.values import ConfigError
from medconv.utils.errors import ArgumentError


@contextmanager
def arguments_as_keys(*groups: str, **keys: str) -> Iterator[None]:
    """Inside, an error about an argument that is also a config key names the key in its place.

    It also decorates a function.

    Args:
        groups: of the config, such as `data`; their keys have the names of the arguments.
        keys: argument to key, where the names differ or the config does not declare the key.
    Raises:
        ConfigError: instead of the `ArgumentError`.
    """
    try:
        yield
    except ArgumentError as error:
        if _key_of(error.argument, groups, keys) == error.argument:
            raise
        message = error.renamed(lambda argument: _key_of(argument, groups, keys))
        raise ConfigError(message) from error


def _key_of(argument: str, groups: Sequence[str], keys: Mapping[str, str]) -> str:
    """The key of an argument; the argument itself if it has none."""
    # `images.t1` is a part of the argument `images`
    name, dot, member = argument.partition(".")
    if name in keys:
        return f"{keys[name]}{dot}{member}"
    group_types = get_type_hints(RunConfig)
    for group in groups:
        if any(field.name == name for field in fields(group_types[group])):
            return f"{group}.{argument}"
    return argument
