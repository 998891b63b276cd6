"""Classes that a `_target_` names: what they take, in place of another class too, the objects that nodes
describe, and errors that name their key.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any, get_type_hints

from hydra._internal.utils import _locate  # `get_object` without the message that it logs of an error
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from medconv import doors
from medconv.config.schema import GROUPS_WITH_CLASS, DataConfig, RunConfig, conf_dir
from medconv.config.values import ConfigError, as_text, fits, in_words, is_plain
from medconv.doors import missing_feature
from medconv.utils.errors import ArgumentError, first_line, with_class

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_CONV_OF_OUR_NETWORKS = "smooth"  # of conf/model/customconv.yaml
# keys that are no arguments of the class
_READ_ELSEWHERE = {"conv": ("where", "share")}
# planned for our networks: MONAI's have arguments of these names and other forms
_PLANNED = tuple(f"${{derived.{name}}}" for name in ("channels", "strides", "kernel_sizes", "stage_strides"))

log = logging.getLogger(__name__)


def search_folder(target: str, folder: Path) -> None:
    """Let a class or package that the user named be found in a folder, such as the current one.

    The user names it on the command line or in a YAML file; never called for names from a checkpoint.
    Installed packages come first.
    """
    package = target.partition(".")[0]
    is_here = (folder / f"{package}.py").is_file() or (folder / package).is_dir()
    if is_here and package.isidentifier() and find_spec(package) is None:
        sys.path.append(str(folder))


def add_package(name: str, *folders: Path) -> None:
    """Import a package that the user named, which brings its parts by the doors (`medconv/doors.py`).

    Args: folders: where it may be beside installed packages; the current folder always.
    Raises: ConfigError: it cannot be imported.
    """
    for folder in (Path.cwd(), *folders):
        search_folder(name, folder)
    try:
        doors.add_package(name)
    except Exception as error:  # importing a user's package may raise anything
        raise ConfigError(f"--package {name}: cannot be imported ({_reason(error, name)})") from error


def check_named(packages: Any, source: Path) -> None:
    """Check that the user has named the packages that a file was made with: a file never imports one itself.

    Args:
        packages: as the file records them, which may be malicious.
    Raises: ConfigError: names the first that is missing.
    """
    for name in packages if isinstance(packages, list) else ():
        if name not in doors.named_packages:
            raise ConfigError(f"{source} was made with a package of your own: add --package {name!s:.80}")


def _reason(error: Exception, target: str) -> str:
    feature = missing_feature(target)
    if feature is not None:
        return f"this installation lacks {feature}"
    cause = error.__cause__ or error
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing and f"{target}.".startswith(f"{missing}."):
        parent, _, name = missing.rpartition(".")
        if parent:
            return f"{parent} has no {name}"
        return (
            f"there is no module {name} among installed packages, in PYTHONPATH, in {Path.cwd()}, or in "
            "or beside the folder of --config-dir"
        )
    return with_class(cause)


def class_of(target: str) -> Any:
    """The class or function that a `_target_` names; None if it cannot be imported."""
    try:
        return _locate(target)
    except Exception:  # importing a user's module may raise anything; `check_classes` reports it
        return None


def arguments_of(target: str) -> Mapping[str, Parameter] | None:
    """The arguments of a class or function by name; None if it cannot be imported or does not tell them."""
    named_object = class_of(target)
    for evaluate in (True, False):  # annotations may need names that only a type checker imports
        try:
            return signature(named_object, eval_str=evaluate).parameters
        except Exception:  # of a class in C, or of the annotations of a user's module
            continue
    return None


def check_arguments(
    node: Mapping[str, Any], key: str, added: Sequence[str] = (), positional: int = 0
) -> None:
    """Check that a node's class takes its keys, and needs no others; unless it does not tell them.

    Args:
        key: of the node, for messages.
        added: names of arguments that the caller adds to the keys.
        positional: number of arguments that the caller gives by position, which come first.
    Raises: ConfigError: a key that the class has no argument for, or an argument that has no key.
    """
    target = node.get("_target_")
    arguments = None if target is None else arguments_of(str(target))
    if arguments is None or "_args_" in node:
        return
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    named = [name for name, argument in arguments.items() if argument.kind in _NAMED]
    by_position = [name for name, argument in arguments.items() if argument.kind in _BY_POSITION][:positional]
    keys = [name for name in node if not name.startswith("_")]
    refused = [] if takes_any else [name for name in added if name not in named]
    if refused:
        raise ConfigError(
            f"{key}: {target} has no argument {refused[0]}; a class of this group is built with "
            f"{', '.join(added)}"
        )
    unknown = [] if takes_any else [name for name in keys if name not in named]
    if unknown:
        near = [f"{key}.{match}" for match in get_close_matches(unknown[0], named, n=2, cutoff=0.6)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(named)}"
        raise ConfigError(f"there is no key {key}.{unknown[0]}: {target} has no such argument; {hint}")
    set_arguments = {*keys, *added, *by_position}
    missing = [
        name for name in named if name not in set_arguments and arguments[name].default is Parameter.empty
    ]
    if missing:
        raise ConfigError(
            f"{key}.{missing[0]} is missing: {target} needs it; ++{key}.{missing[0]}=... sets it"
        )


def fit_classes(composed: DictConfig, settings: Any) -> None:
    """Adapt a composed config to classes that replace those of the chosen options.

    Of an option's keys such a class keeps those that it can use, see `_is_usable`. For `model`, convolutions
    stay as they are unless a `conv` is asked for or the network declares our own as its `default_conv`.

    Args: settings: Hydra's own.
    """
    # as they were typed: Hydra's list would fill in their interpolations
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    typed: dict[str, str] = {}
    for override in overrides or ():
        key, _, value = str(override).lstrip("+").partition("=")
        typed[key] = value
    choices = settings.runtime.choices
    with open_dict(composed), read_write(settings):
        for group in GROUPS_WITH_CLASS:
            if group in composed and group in choices:
                _leave_out(composed[group], group, choices[group], typed)
        # smooth kernels have first weights of their own, with which other networks were not tried
        if "model._target_" in typed and _keeps_its_convolutions(typed, choices):
            composed.conv = OmegaConf.load(conf_dir() / "conv" / "none.yaml")
            choices.conv = "none"
            log.info(
                "conv=none: %s keeps its own initial weights; conv=%s would draw new ones",
                typed["model._target_"],
                _CONV_OF_OUR_NETWORKS,
            )


def _keeps_its_convolutions(typed: Mapping[str, str], choices: Mapping[str, str]) -> bool:
    """Whether the network of the command line is not made for our convolutions, and no `conv` is named."""
    asks_for_conv = any(key.partition(".")[0] == "conv" for key in typed)
    if asks_for_conv or choices.get("conv") != _CONV_OF_OUR_NETWORKS:
        return False
    network = class_of(typed["model._target_"])
    return getattr(network, "default_conv", None) != _CONV_OF_OUR_NETWORKS


def _leave_out(node: Any, group: str, choice: str, typed: Mapping[str, str]) -> None:
    """Leave out the keys of a group's option that the class in the place of its own cannot use.

    Args: typed: what the command line sets; it and an experiment keep their keys, so that wrong ones fail.
    """
    file = conf_dir() / group / f"{choice}.yaml"
    option: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    option_target = option.get("_target_", "")
    is_named = f"{group}._target_" in typed
    try:
        node_target = node.get("_target_")
    except OmegaConfBaseException:  # an interpolation that only the data fills in
        node_target = None
    is_replaced = is_named or option_target != node_target
    if not OmegaConf.is_dict(node) or not is_replaced or node.get("_target_") is None:
        return
    values: Any = OmegaConf.to_container(node, resolve=False)
    target = str(values["_target_"])
    arguments = arguments_of(target)
    if arguments is None:
        return
    takes_the_same = _takes_the_same(target, str(option_target), option)
    dropped = []
    for key, value in values.items():
        # a network of the user's own gets no defaults of ours, whatever an option has made of them
        is_default = value == option.get(key, "") or (is_named and group == "model" and option)
        is_set = f"{group}.{key}" in typed or not is_default
        if key.startswith("_") or is_set or key in _READ_ELSEWHERE.get(group, ()):
            continue
        is_kept = (takes_the_same and key in arguments) or _is_usable(key, value, arguments)
        if not is_kept:
            del node[key]
            dropped.append(key)
    if dropped:
        log.info("%s: %s gets no %s of %s=%s", group, target, ", ".join(dropped), group, choice)


def _is_usable(key: str, value: Any, arguments: Mapping[str, Parameter]) -> bool:
    """Whether a class takes a value that was chosen for another class.

    It does if it cannot do without it, or if the value describes the data, such as the number of channels.
    For everything else it has defaults of its own.
    """
    if key not in arguments:
        return any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if arguments[key].default is Parameter.empty:
        return value is not None  # null stands for what only the option's own class works out
    is_interpolation = isinstance(value, str) and "${" in value
    return is_interpolation and value not in _PLANNED


def _takes_the_same(target: str, option_target: str, option: Mapping[str, Any]) -> bool:
    """Whether a class takes all keys of an option in the same meaning as the option's own class.

    It is a subclass, or its arguments have the same names and annotations.
    """
    replacement = class_of(target)
    original = class_of(option_target) if option_target else None
    if isclass(replacement) and isclass(original) and issubclass(replacement, original):
        return True
    original_arguments = arguments_of(option_target) if option_target else None
    arguments = arguments_of(target)
    if original_arguments is None or arguments is None:
        return False
    keys = [key for key in option if key in original_arguments]
    return all(
        key in arguments and arguments[key].annotation == original_arguments[key].annotation for key in keys
    )


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
        name: built(value, f"{key}.{name}") if is_recursive else deepcopy(value)
        for name, value in node.items()
        if name not in _HYDRAS_KEYS
    }
    positional = built(list(node.get("_args_", ())), f"{key}._args_")
    try:
        make = instantiate({"_target_": target, "_partial_": True})
        if node.get("_partial_") and not kwargs:
            # Of the same type, which may check each call; a partial of `make` would hide the class itself
            bound = type(make)(make.func, *positional, **arguments)
            bound.__dict__.update(make.__dict__)
            return bound
        return make(*positional, **{**arguments, **kwargs})
    except InstantiationException as error:
        reason = first_line(error.__cause__ or error)
        if "<module" in reason:
            reason = f"it is a module; export its {str(target).rpartition('.')[2]} in the package around it"
        raise ConfigError(f"{key}: {target} cannot be built: {reason}") from error
    except ConfigError:  # names a key itself
        raise
    except ArgumentError as error:
        message = error.renamed(lambda argument: _key_of(argument, node, key))
        comes_from_node = error.argument.partition(".")[0] in node
        raise ConfigError(message if comes_from_node else f"{key}: {message}") from error
    except ValueError as error:
        text = str(error) or type(error).__name__  # an error may have no text
        raise ConfigError(f"{key}: {text}") from error
    except TypeError as error:
        raise ConfigError(f"{key}: {target} cannot be built: {first_line(error)}") from error


def built(value: Any, key: str) -> Any:
    """A copy of an argument in which every node is the object that it describes."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return build(value, key)
        return {name: built(child, f"{key}.{name}") for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [built(child, f"{key}[{index}]") for index, child in enumerate(value)]
    return value


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


def check_classes(node: Any, key: str) -> None:
    """Check that every class in a node can be imported, and its arguments against its annotations.

    Only true or false, numbers, words and null are checked; classes check others, such as sequences,
    themselves.
    Raises: ConfigError: a target cannot be imported, or takes another type for a key; names the key.
    """
    nodes = [(node_key, each) for node_key, each in iter_nodes(node, key) if each["_target_"] is not None]
    for node_key, described in nodes:
        target = str(described["_target_"])
        try:
            _locate(target)
        except Exception as error:  # importing a user's module may raise anything
            reason = _reason(error, target)
            raise ConfigError(f"{node_key}._target_={target}: cannot be imported ({reason})") from error
    for node_key, described in nodes:
        arguments = arguments_of(str(described["_target_"])) or {}
        for name, value in described.items():
            is_filled_in_later = isinstance(value, str) and (value == "???" or "${" in value)
            argument = arguments.get(name)
            if argument is None or is_filled_in_later or not is_plain(argument.annotation):
                continue
            if not fits(value, argument.annotation) and type(value) is not type(argument.default):
                expected = in_words(argument.annotation)
                raise ConfigError(f"{node_key}.{name} must be {expected}, got {as_text(value)}")


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
        if _declared_key_of(error.argument, groups, keys) == error.argument:
            raise
        message = error.renamed(lambda argument: _declared_key_of(argument, groups, keys))
        raise ConfigError(message) from error


def _declared_key_of(argument: str, groups: Sequence[str], keys: Mapping[str, str]) -> str:
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
