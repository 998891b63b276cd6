"""What came with a file chooses no code: which classes a checkpoint's config may name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

from hydra.utils import get_object
from torch import nn

from medconv.config import ConfigError, build

NETWORKS = ("medconv", "monai.networks", "torch.nn")  # whose network classes a checkpoint may name
_FILES = (
    "cache_dir",
    "checkpoint",
    "filename",
    "path_or_repo_id",
)  # arguments that name what a class would read or fetch


def build_trusted(node: Mapping[str, Any], key: str, trusted: Sequence[str] = ()) -> Any:
    """As `build`, for a node that came with a file, which must not choose code: nothing else is imported or
    called.

    Every `_target_` in it must be an `nn.Module` class of `NETWORKS`, one of medconv's convolutions, or from
    a package that the user named. The object itself is looked at: a name that starts well, such as
    `torch.nn.x.os.system`, does not pass. Nor does an interpolation, of which a run's config has none left:
    `${oc.create:...}` would make further nodes; nor a
    name of a file, a folder or an address, that a class would take first weights from: a checkpoint holds the
        weights.
    Args: trusted: the packages that the user named.
    Raises: ConfigError: any other target, or argument.
    """
    for where, text in _texts(node, key):
        if "${" in text:
            raise ConfigError(
                f"{where} is refused: a checkpoint's config holds values, and this is an interpolation, "
                f"{text!r}"
            )
    for where, part in _nodes(node, key):
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
    """A node's arguments by name, those without one too."""
    positional = node.get("_args_", ())
    if not isinstance(positional, (list, tuple)):
        return dict(node)
    return {**dict(zip(signature(function).parameters, positional, strict=False)), **node}


def _nodes(node: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every node with a `_target_` in a nested one, itself included, with its full key."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from _nodes(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _nodes(child, f"{key}[{index}]")


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text in a nested node, names of keys among them, with its full key."""
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


def _import_object(target: str) -> Any:
    """What a dotted name means to Hydra; None: nothing."""
    hydra = logging.getLogger("hydra.utils")  # says so, too
    before, hydra.disabled = hydra.disabled, True
    try:
        return get_object(target)
    except Exception:  # whatever importing raises
        return None
    finally:
        hydra.disabled = before


def _below(module: str, roots: Sequence[str]) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)
