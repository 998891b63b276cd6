"""Read files of weights, ours and others': tensors by name; no code in a file is run."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medconv.utils import checkpoint_io


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a file by its dotted name, and the metadata of a file of ours (else empty).

    Nested mappings, such as the `state_dict` of a checkpoint, become part of the name; `match` finds where
    the network's own names begin. Of our checkpoints only the state dict is read.

    Raises:
        ValueError: the file is missing, damaged, holds objects, or holds no tensors.
    """
    is_safetensors = path.suffix == ".safetensors"
    # pickles are read with `weights_only=True`
    content: Any = _safetensors(path) if is_safetensors else checkpoint_io.unpickled(path, True)
    metadata: Any = {}
    if is_safetensors:
        metadata = _safetensors_metadata(path)
    elif checkpoint_io.is_ours(content):
        metadata = content["medconv"]
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected tensors by name (a state dict)")
    tensors = dict(_tensors(content, "", set()))
    if not tensors:
        raise ValueError(f"{path}: holds no tensors by name, expected a state dict")
    return tensors, metadata if isinstance(metadata, dict) else {}


def planned_as(path: Path) -> dict[str, Any]:
    """Size and slice axis of the run that a file of ours is from; of another file or a folder nothing.

    Raises:
        ValueError: as `read`.
    """
    if path.is_dir():
        return {}
    _, metadata = read(path)
    derived = config_group(metadata, "derived")
    if derived is None:
        return {}
    # Checkpoints without a size are older than sizes; all networks were as `full` has them.
    size = str(derived.get("size") or "full")
    return {"size": size, "slice_axis": derived.get("slice_axis")}


def config_group(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A group of a checkpoint's config, such as `conv`; None: other files have none."""
    config = metadata.get("config")
    group = config.get(name) if isinstance(config, Mapping) else None
    return group if isinstance(group, Mapping) else None


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ValueError(
            f"{path}: needs the package safetensors: pip install 'medconv[safetensors]'"
        ) from error
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        return load_file(path)
    except Exception as error:  # a made-up file may raise anything
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: damaged or not a safetensors file ({reason})") from error


def _safetensors_metadata(path: Path) -> Any:
    """What `medconv export` wrote into the header; empty for files of others."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("medconv", "{}")
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return {}


def _tensors(node: Mapping[Any, Any], prefix: str, visited_ids: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Dense tensors in a nested mapping, by dotted name.

    Args:
        prefix: of the names in this mapping.
        visited_ids: of mappings, because one may hold itself; one under two names counts under the first.
    """
    visited_ids.add(id(node))
    for key, value in node.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Mapping) and id(value) not in visited_ids:
            yield from _tensors(value, f"{prefix}{key}.", visited_ids)
        elif isinstance(value, Tensor) and _is_dense(value):
            yield prefix + key, value.detach()


def _is_dense(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized and not value.is_meta
