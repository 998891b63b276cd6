"""Which classes a checkpoint's config may name, so that loading a file cannot run arbitrary code."""

import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from hydra.utils import get_object
from torch import nn

from medconv.config import ConfigError, build
from medconv.config.instantiate import check_no_interpolation, iter_nodes, search_current_folder

NETWORKS = ("medconv", "monai.networks", "torch.nn")  # whose network classes a checkpoint may name
_FILES = (
    "cache_dir",
    "checkpoint",
    "filename",
    "path_or_repo_id",
)  # arguments that name what a class would read or fetch


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
    for where, part in iter_nodes(node, key):
        _need_harmless(where, part, trusted)
    return build(node, key)


def _need_harmless(key: str, node: Mapping[str, Any], trusted: Sequence[str]) -> None:
    target = str(node["_target_"])
    named_object = _import_object(target) if _below(target, [*NETWORKS, *trusted]) else None
    home = getattr(named_object, "__module__", None)
    home = home if isinstance(home, str) else ""
    if callable(named_object) and _below(home, trusted):
        return
    is_network = isinstance(named_object, type) and issubclass(named_object, nn.Module)
    if not (
        (is_network and _below(home, NETWORKS))
        or (callable(named_object) and _below(home, ["medconv.convs"]))
    ):
        raise ConfigError(
            f"{key}._target_={target} is refused: a checkpoint may name network classes of "
            f"{', '.join(NETWORKS)} only; trust your own package by --trust-package NAME"
        )
    for name, value in _arguments(named_object, node).items():
        if isinstance(value, str) and (name in _FILES or str(name).startswith("pretrained")):
            raise ConfigError(
                f"{key}.{name}={value} is refused: a checkpoint may not name what its network would fetch"
            )


def _arguments(function: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    """A node's arguments by name, including positional ones."""
    positional = node.get("_args_", ())
    if not isinstance(positional, (list, tuple)):
        return dict(node)
    return {**dict(zip(signature(function).parameters, positional, strict=False)), **node}


def _import_object(target: str) -> Any:
    """The object that Hydra finds by a dotted name; None if there is none."""
    hydra = logging.getLogger("hydra.utils")  # logs an error of its own
    before, hydra.disabled = hydra.disabled, True
    try:
        return get_object(target)
    except Exception:  # an import can raise anything
        return None
    finally:
        hydra.disabled = before


def _below(module: str, roots: Sequence[str]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)
