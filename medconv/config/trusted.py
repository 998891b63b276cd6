"""Which classes a checkpoint's config may name, so that loading a file cannot run arbitrary code."""

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

from medconv.config import ConfigError, build
from medconv.config.instantiate import add_package, class_of, iter_nodes
from medconv.config.values import texts

NETWORKS = ("medconv", "monai.networks", "torch.nn")  # whose network classes a checkpoint may name
# Arguments by which a class reads or fetches weights, beside those with `pretrained` in their name
_FILES = ("cache_dir", "checkpoint", "filename", "path_or_repo_id", "weights")
_MAX_VALUES = 100_000  # in a config; ours have some hundred
_MAX_OBJECTS = 1_000  # in a node


def build_trusted(node: Mapping[str, Any], key: str, trusted: Sequence[str] = ()) -> Any:
    """Like `build`, for a config from a file, which may be malicious: imports and calls only what is allowed.

    Every `_target_` must be an `nn.Module` class of `NETWORKS`, one of medconv's convolutions, or from a
    trusted package. The object itself is checked, so `torch.nn.x.os.system` is refused. Two more things are
    refused: interpolations, because `${oc.create:...}` would create further nodes (a run's config has none
    left); and arguments by which a class would read or fetch initial weights, such as `pretrained`, unless
    they are false (the checkpoint holds the weights).
    Args: trusted: the packages that the user trusts.
    Raises: ConfigError: any other target or argument; too many of them.
    """
    check_size(node, key)
    for text_key, text in texts(node, key):
        if "${" in text:  # an interpolation, which may compute anything
            raise ConfigError(
                f"{text_key} is refused: a checkpoint's config holds values, and this is an interpolation, "
                f"{text!r}"
            )
    for package in trusted:  # the user named it
        add_package(package)
    for node_key, described in iter_nodes(node, key):
        _need_harmless(node_key, described, trusted)
    return build(node, key)


def _need_harmless(key: str, node: Mapping[str, Any], trusted: Sequence[str]) -> None:
    target = str(node["_target_"])
    named_object = class_of(target) if _below(target, [*NETWORKS, *trusted]) else None
    home = getattr(named_object, "__module__", None)  # where it is defined, not from where it is reached
    if not isinstance(home, str):
        home = ""
    if callable(named_object) and _below(home, trusted):
        return
    is_module = isinstance(named_object, type) and issubclass(named_object, nn.Module)
    is_network = is_module and _below(home, NETWORKS)
    # a function or class of `medconv.convs`, or a class of a feature that derives from one
    kinds = [kind.__module__ for kind in getattr(named_object, "__mro__", ())] or [home]
    is_ours = callable(named_object) and _below(home, ["medconv"])
    is_convolution = is_ours and any(_below(kind, ["medconv.convs"]) for kind in kinds)
    if not is_network and not is_convolution:
        raise ConfigError(
            f"{key}._target_={target} is refused: a checkpoint may name network classes of "
            f"{', '.join(NETWORKS)} only; your own package is named by "
            f"{_naming((home or target).partition('.')[0])}"
        )
    for name, value in _arguments(named_object, node).items():
        if value and (name in _FILES or "pretrained" in str(name)):
            raise ConfigError(
                f"{key}.{name}={value} is refused: a checkpoint may not name what its network would read or "
                f"fetch; for a checkpoint of your own, add {_naming(home.partition('.')[0])}"
            )


def packages_of(*nodes: Mapping[str, Any] | None) -> list[str]:
    """The packages of classes in a config of the user's own; not those that others wrote, of which a
    checkpoint may name networks alone.
    """
    targets = [str(described["_target_"]) for node in nodes if node for _, described in iter_nodes(node, "")]
    homes = {target.partition(".")[0] for target in targets}
    return sorted(homes - {"medconv", "monai", "torch"} - sys.stdlib_module_names)


def _naming(package: str) -> str:
    """How a package is named as trusted."""
    return f"--package {package} (in Python, trusted=[{package!r}])"


def _arguments(function: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """A node's arguments by name, including positional ones and defaults."""
    parameters = signature(function).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    positional = node.get("_args_", ())
    if not isinstance(positional, (list, tuple)):
        positional = ()
    by_position = dict(zip(parameters, positional, strict=False))
    return {**defaults, **by_position, **node}


def check_size(node: Any, key: str) -> None:
    """Check the size of a config from a file before it is copied or built.

    Shared parts count as often as they occur: a few kilobytes can stand for billions of values.
    Raises: ConfigError: too many values or objects.
    """
    values = 0
    objects = 0
    pending = [node]
    while pending:
        value = pending.pop()
        values += 1
        if isinstance(value, Mapping):
            objects += "_target_" in value
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        if values + len(pending) > _MAX_VALUES or objects > _MAX_OBJECTS:
            raise ConfigError(
                f"{key} is refused: a checkpoint's config may hold {_MAX_VALUES} values and {_MAX_OBJECTS} "
                "objects, and this one holds more"
            )


def _below(module: str, roots: Sequence[str]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)
