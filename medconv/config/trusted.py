"""Which classes a checkpoint's config may name, so that loading a file cannot run arbitrary code."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

from medconv.config import ConfigError, build
from medconv.config.instantiate import (
    check_no_interpolation,
    class_of,
    iter_nodes,
    search_current_folder,
)

NETWORKS = ("medconv", "monai.networks", "torch.nn")  # whose network classes a checkpoint may name
_FILES = ("cache_dir", "checkpoint", "filename", "path_or_repo_id")  # what a class would read or fetch


def build_trusted(node: Mapping[str, Any], key: str, trusted: Sequence[str] = ()) -> Any:
    """Like `build`, for a config from a file, which may be malicious: imports and calls only what is allowed.

    Every `_target_` must be an `nn.Module` class of `NETWORKS`, one of medconv's convolutions, or from a
    trusted package. The object itself is checked, so `torch.nn.x.os.system` is refused. Two more things are
    refused: interpolations, because `${oc.create:...}` would create further nodes (a run's config has none
    left); and names of files, folders or URLs from which a class would load initial weights (the checkpoint
    holds the weights).
    Args: trusted: the packages that the user trusts.
    Raises: ConfigError: any other target or argument.
    """
    check_no_interpolation(node, key)
    for package in trusted:  # named on the command line
        search_current_folder(package)
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
    is_convolution = callable(named_object) and _below(home, ["medconv.convs"])
    if not is_network and not is_convolution:
        raise ConfigError(
            f"{key}._target_={target} is refused: a checkpoint may name network classes of "
            f"{', '.join(NETWORKS)} only; trust your own package by --trust-package NAME"
        )
    for name, value in _arguments(named_object, node).items():
        names_a_file = name in _FILES or str(name).startswith("pretrained")
        if names_a_file and isinstance(value, str):
            raise ConfigError(
                f"{key}.{name}={value} is refused: a checkpoint may not name what its network would fetch"
            )


def _arguments(function: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """A node's arguments by name, including positional ones."""
    positional = node.get("_args_", ())
    if not isinstance(positional, (list, tuple)):
        return dict(node)
    names = signature(function).parameters
    by_position = dict(zip(names, positional, strict=False))
    return {**by_position, **node}


def _below(module: str, roots: Sequence[str]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)
