"""Objects from config nodes with a `_target_`; errors name the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate


class ConfigError(ValueError):
    """The user's configuration is at fault; the message names the key."""


def plain(value: Any) -> Any:
    """Tuples to lists, all the way down: what YAML and `weights_only` loading hold."""
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def tuples(value: Any) -> Any:
    """Lists to tuples, all the way down."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def build(node: Mapping[str, Any], key: str, **kwargs: Any) -> Any:
    """The object that a node's `_target_` and arguments describe; `kwargs` go to it as they are, never read
    as nodes.

    Raises: ConfigError: names the key, the class and what it said.
    """
    target = node.get("_target_")
    try:
        make = instantiate({**node, "_partial_": True}, _convert_="all")
        return make if node.get("_partial_") and not kwargs else make(**kwargs)
    except InstantiationException as error:
        raise ConfigError(
            f"{key}: {target} cannot be built: {_first_line(error.__cause__ or error)}"
        ) from error
    except ValueError as error:
        named = str(error).startswith(key.split(".")[0])  # our own messages begin with the key at fault
        raise ConfigError(str(error) if named else f"{key}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{key}: {target} cannot be built: {_first_line(error)}") from error


def naming(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same partial function, its complaints turned into a ConfigError that names the key and shows the
    arguments.
    """
    bound = ", ".join(f"{name}={value}" for name, value in getattr(function, "keywords", {}).items())

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{key}: {_first_line(error)} (given {bound})") from error

    return named


def targets(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every `_target_` in a nested node, with its full key."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield f"{key}._target_", str(node["_target_"])
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from targets(child, f"{key}[{index}]")


def _importable(key: str, target: str) -> None:
    try:
        get_object(target)
    except Exception as error:  # whatever importing a user's module raises
        raise ConfigError(f"{key}={target}: cannot be imported ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
