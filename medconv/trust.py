"""What came with a file chooses no code: which classes a checkpoint's config may name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.utils import get_object
from torch import nn

from medconv.config import ConfigError, build, targets

NETWORKS = ("medconv", "monai.networks", "torch.nn")  # whose network classes a checkpoint may name


def build_trusted(node: Mapping[str, Any], key: str, trusted: Sequence[str] = (), homes: Sequence[str] = NETWORKS) -> Any:
    """As `build`, for a node that came with a file, which must not choose code: nothing else is imported or called.

    Every `_target_` in it must be an `nn.Module` class of `homes`, one of medconv's convolutions, or from a package that
    the user named. The object itself is looked at: a name that starts well, such as `torch.nn.x.os.system`, does not pass.
    Nor does an interpolation, of which a run's config has none left: `${oc.create:...}` would make further nodes.
    Args: trusted: the packages that the user named. homes: the modules that classes may be defined in.
    Raises: ConfigError: any other target.
    """
    for where, text in _texts(node, key):
        if "${" in text:
            raise ConfigError(
                f"{where} is refused: a checkpoint's config holds values, and this is an interpolation, {text!r}"
            )
    for where, target in targets(node, key):
        found = _found(target) if _below(target, [*homes, *trusted]) else None
        home = getattr(found, "__module__", None)
        home = home if isinstance(home, str) else ""
        network = isinstance(found, type) and issubclass(found, nn.Module) and _below(home, homes)
        if not (network or (callable(found) and _below(home, ["medconv.convs", *trusted]))):
            raise ConfigError(
                f"{where}={target} is refused: a checkpoint may name network classes of {', '.join(homes)} only; "
                "trust your own package by --allow NAME"
            )
    return build(node, key)


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


def _found(target: str) -> Any:
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
