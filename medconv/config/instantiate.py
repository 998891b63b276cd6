"""Objects from config nodes with a `_target_`; errors name the key."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from inspect import Parameter
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from medconv.config.classes import arguments_of
from medconv.config.data_config import DataConfig
from medconv.config.value_types import as_text, fits, in_words, is_plain
from medconv.config.values import ConfigError, texts
from medconv.utils.errors import ArgumentError, first_line

_HYDRAS_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")


def build(node: Mapping[str, Any], key: str, **kwargs: Any) -> Any:
    """The object that a node's `_target_` and arguments describe, as Hydra's `instantiate` reads them.

    Hydra gets the target alone: in its hands an argument such as a class name of the data, `${oc.env:HOME}`,
    would be an interpolation.
    Args:
        key: of the node, for messages.
        kwargs: passed to the class unchanged; they are not searched for nodes.
    Raises: ConfigError: names the key, the class and its error.
    """
    target = node.get("_target_")
    is_recursive = node.get("_recursive_", True)
    arguments = {
        name: _argument(value, f"{key}.{name}") if is_recursive else deepcopy(value)
        for name, value in node.items()
        if name not in _HYDRAS_KEYS
    }
    positional = _argument(list(node.get("_args_", ())), f"{key}._args_")
    try:
        make = instantiate({"_target_": target, "_partial_": True})
        if node.get("_partial_") and not kwargs:
            # Of the same type, which may check each call; a partial of `make` would hide the class itself
            bound = type(make)(make.func, *positional, **arguments)
            bound.__dict__.update(make.__dict__)
            return bound
        return make(*positional, **{**arguments, **kwargs})
    except InstantiationException as error:
        raise ConfigError(
            f"{key}: {target} cannot be built: {first_line(error.__cause__ or error)}"
        ) from error
    except ConfigError:  # names a key itself
        raise
    except ArgumentError as error:
        raise ConfigError(_with_key(error, node, key)) from error
    except ValueError as error:
        text = str(error) or type(error).__name__  # an error may have no text
        raise ConfigError(f"{key}: {text}") from error
    except TypeError as error:
        raise ConfigError(f"{key}: {target} cannot be built: {first_line(error)}") from error


def _argument(value: Any, key: str) -> Any:
    """A copy of an argument in which every node is the object that it describes."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return build(value, key)
        return {name: _argument(child, f"{key}.{name}") for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_argument(child, f"{key}[{index}]") for index, child in enumerate(value)]
    return value


def _with_key(error: ArgumentError, node: Mapping[str, Any], key: str) -> str:
    """The message of an error about an argument, with the key that gave it."""
    message = error.renamed(lambda argument: _key_of(argument, node, key))
    comes_from_node = error.argument.partition(".")[0] in node
    return message if comes_from_node else f"{key}: {message}"


def _key_of(argument: str, node: Mapping[str, Any], key: str) -> str:
    """The key that gives an argument of the node's class; the argument itself if the node lacks it."""
    name = argument.partition(".")[0]
    if name not in node:
        return argument
    # conf/data/*.yaml give a layout the keys of `data`, by the same names
    is_key_of_data = key == "data.layout" and name in DataConfig.__dataclass_fields__
    return f"data.{argument}" if is_key_of_data else f"{key}.{argument}"


def errors_with_key(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same partial function, but its errors become a ConfigError with the key and the arguments."""
    bound = ", ".join(f"{name}={value}" for name, value in getattr(function, "keywords", {}).items())
    settings_text = f" (given {bound})" if bound else ""

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{key}: {first_line(error)}{settings_text}") from error

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
    for node_key, described in iter_nodes(node, key):
        target = described["_target_"]
        if target is not None:
            yield f"{node_key}._target_", str(target)


def check_types(node: Any, key: str) -> None:
    """Check the arguments of every class in a node against its annotations.

    Only true or false, numbers, words and null are checked; classes check others, such as sequences,
    themselves.
    Raises: ConfigError: a class takes another type for a key, which the message names.
    """
    for node_key, described in iter_nodes(node, key):
        target = described["_target_"]
        arguments = None if target is None else arguments_of(str(target))
        for name, value in described.items():
            if arguments is not None and name in arguments:
                _check_type(value, arguments[name], f"{node_key}.{name}")


def _check_type(value: Any, argument: Parameter, key: str) -> None:
    is_filled_in_later = isinstance(value, str) and (value == "???" or "${" in value)
    if is_filled_in_later or not is_plain(argument.annotation):
        return
    if not fits(value, argument.annotation) and type(value) is not type(argument.default):
        raise ConfigError(f"{key} must be {in_words(argument.annotation)}, got {as_text(value)}")


def check_no_interpolation(node: Any, key: str) -> None:
    """Raises: ConfigError: a string of a node from a file is an interpolation, which may compute anything."""
    for text_key, text in texts(node, key):
        if "${" in text:
            raise ConfigError(
                f"{text_key} is refused: a checkpoint's config holds values, and this is an interpolation, "
                f"{text!r}"
            )
