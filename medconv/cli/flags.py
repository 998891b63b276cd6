"""Errors about arguments of Python functions as errors about the flags of a command."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from medconv.utils.errors import ArgumentError


def flag_of(option: str) -> str:
    """The flag of an option, such as `--mirror-axes` of `mirror_axes`."""
    return f"--{option.replace('_', '-')}"


def name_of(flag: str) -> str:
    """The option of a flag, such as `mirror_axes` of `--mirror-axes`."""
    return flag.removeprefix("--").replace("-", "_")


@contextmanager
def arguments_as_flags(options: argparse.Namespace) -> Iterator[None]:
    """Inside, an error about an argument that is also an option names the flag in its place.

    Raises:
        ValueError: instead of the `ArgumentError`.
    """
    try:
        yield
    except ArgumentError as error:
        if not hasattr(options, error.argument):
            raise
        message = error.renamed(lambda name: flag_of(name) if hasattr(options, name) else name)
        raise ValueError(message) from error
