"""Objects from config nodes with a `_target_`; errors name the key."""

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from medconv.config.values import ConfigError
from medconv.utils.errors import first_line

# Types that are checked before anything is prepared; classes check others, such as sequences, themselves.
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    type(None): "null",
}


def build(node: Mapping[str, Any], key: str, **kwargs: Any) -> Any:
    """The object that a node's `_target_` and arguments describe.

    Args: kwargs: passed to the class unchanged; Hydra does not search them for nodes.
    Raises: ConfigError: names the key, the class and its error.
    """
    target = node.get("_target_")
    try:
        make = instantiate({**node, "_partial_": True}, _convert_="all")
        return make if node.get("_partial_") and not kwargs else make(**kwargs)
    except InstantiationException as error:
        raise ConfigError(
            f"{key}: {target} cannot be built: {first_line(error.__cause__ or error)}"
        ) from error
    except ValueError as error:
        has_key = str(error).startswith(key.split(".")[0])  # our own messages begin with the key
        raise ConfigError(str(error) if has_key else f"{key}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{key}: {target} cannot be built: {first_line(error)}") from error


def errors_with_key(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same partial function, but its errors become a ConfigError with the key and the arguments."""
    bound = ", ".join(f"{name}={value}" for name, value in getattr(function, "keywords", {}).items())

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{key}: {first_line(error)} (given {bound})") from error

    return named


def iter_nodes(node: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """This node and all nested ones that have a `_target_`, each with its full key."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from iter_nodes(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from iter_nodes(child, f"{key}[{index}]")


def iter_targets(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every `_target_` in a nested node, with its full key."""
    for where, found in iter_nodes(node, key):
        if found["_target_"] is not None:
            yield f"{where}._target_", str(found["_target_"])


def check_importable(key: str, target: str) -> None:
    """Raises: ConfigError: the target cannot be imported; names the key."""
    try:
        get_object(target)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(f"{key}={target}: cannot be imported ({first_line(error)})") from error


def search_current_folder(target: str) -> None:
    """Let a class or package that the user named on the command line be found in the current folder.

    Never called for names from a checkpoint. Installed packages come first.
    """
    package, here = target.partition(".")[0], Path.cwd()
    is_here = (here / f"{package}.py").is_file() or (here / package).is_dir()
    if is_here and package.isidentifier() and find_spec(package) is None:
        sys.path.append(str(here))


def check_types(node: Any, key: str) -> None:
    """Raises: ConfigError: a class of medconv takes another type for a key, which the message names."""
    for where, found in iter_nodes(node, key):
        if str(found["_target_"]).startswith("medconv."):
            arguments = signature(get_object(found["_target_"])).parameters
            for name, value in found.items():
                if name in arguments:
                    _check_type(value, arguments[name].annotation, f"{where}.{name}")


def _check_type(value: Any, annotation: Any, key: str) -> None:
    union = get_origin(annotation) in (Union, UnionType)
    allowed = set(get_args(annotation) if union else (annotation,))
    later = isinstance(value, str) and (value == "???" or "${" in value)
    if later or not allowed <= _WORDS.keys():
        return
    accepted = allowed | {int} if float in allowed else allowed
    if type(value) not in accepted:
        words = " or ".join(word for kind, word in _WORDS.items() if kind in allowed)
        raise ConfigError(f"{key} must be {words}, got {'null' if value is None else value}")


def keys_not_taken(node: Mapping[str, Any]) -> list[str]:
    """Keys of a node that its class has no argument for; none if it cannot be imported, or takes any."""
    try:
        arguments = signature(get_object(str(node["_target_"]))).parameters
    except Exception:  # importing a user's module may raise anything; `check_importable` reports it
        return []
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        return []
    return [key for key in node if not key.startswith("_") and key not in arguments]


def check_no_interpolation(node: Any, key: str) -> None:
    """Raises: ConfigError: a string of a node from a file is an interpolation, which may compute anything."""
    for where, text in _texts(node, key):
        if "${" in text:
            raise ConfigError(
                f"{where} is refused: a checkpoint's config holds values, and this is an interpolation, "
                f"{text!r}"
            )


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every string in a nested node, including the names of keys, with its full key."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            if isinstance(name, str):
                yield key, name
            yield from _texts(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _texts(child, f"{key}[{index}]")
    elif isinstance(node, str):
        yield key, node
