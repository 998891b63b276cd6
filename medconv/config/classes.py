"""Classes and functions that a `_target_` names: where they are searched, and which arguments they take."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from medconv import doors
from medconv.config.values import ConfigError
from medconv.doors import missing_feature
from medconv.utils.errors import with_class

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


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
        if name not in doors.named_packages():
            raise ConfigError(f"{source} was made with a package of your own: add --package {name!s:.80}")


def check_importable(key: str, target: str) -> None:
    """Raises: ConfigError: the target cannot be imported; names the key."""
    try:
        with _without_hydras_message():
            get_object(target)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(f"{key}={target}: cannot be imported ({_reason(error, target)})") from error


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
        with _without_hydras_message():
            return get_object(target)
    except Exception:  # importing a user's module may raise anything; `check_importable` reports it
        return None


@contextmanager
def _without_hydras_message() -> Iterator[None]:
    """Hydra logs an error before it raises it."""
    hydra_log = logging.getLogger("hydra.utils")
    was_disabled = hydra_log.disabled
    hydra_log.disabled = True
    try:
        yield
    finally:
        hydra_log.disabled = was_disabled


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
    if not takes_any:
        _check_taken(keys, added, named, key, str(target))
    set_arguments = {*keys, *added, *by_position}
    missing = [
        name for name in named if name not in set_arguments and arguments[name].default is Parameter.empty
    ]
    if missing:
        raise ConfigError(
            f"{key}.{missing[0]} is missing: {target} needs it; ++{key}.{missing[0]}=... sets it"
        )


def _check_taken(
    keys: Sequence[str], added: Sequence[str], named: Sequence[str], key: str, target: str
) -> None:
    refused = [name for name in added if name not in named]
    if refused:
        raise ConfigError(
            f"{key}: {target} has no argument {refused[0]}; a class of this group is built with "
            f"{', '.join(added)}"
        )
    for name in keys:
        if name not in named:
            near = [f"{key}.{match}" for match in get_close_matches(name, named, n=2, cutoff=0.6)]
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(named)}"
            raise ConfigError(f"there is no key {key}.{name}: {target} has no such argument; {hint}")
