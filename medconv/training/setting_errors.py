"""Errors of a class's own arguments, as errors of the config key that they came from."""

from collections.abc import Iterator
from contextlib import contextmanager

from medconv.config import ConfigError


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Around the construction of an object from one config key, or from one group of keys.

    Args:
        key: dotted key, or group of keys, that holds the arguments.
    Raises:
        ConfigError: the block raised a ValueError; the message begins with the key.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
