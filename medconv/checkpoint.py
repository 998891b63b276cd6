"""Reading checkpoints back; nothing but tensors and plain values is ever unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

_NETWORK = "network."  # what Lightning puts before the network's own parameter names


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content.

    Raises: ValueError: missing, damaged, carrying objects, or not medconv's.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: refused, it holds more than tensors and plain values, or is no checkpoint") from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path}: damaged or not a checkpoint ({type(error).__name__})") from error
    if not isinstance(content, dict) or not {"medconv", "state_dict"} <= set(content):
        raise ValueError(f"{path}: not a medconv checkpoint, the keys `medconv` and `state_dict` are not in it")
    return content


def load_weights(network: nn.Module, content: dict[str, Any], path: Path) -> None:
    """Put the network's weights of a checkpoint into a network. Raises: ValueError: they do not fit."""
    state = {k.removeprefix(_NETWORK): v for k, v in content["state_dict"].items() if k.startswith(_NETWORK)}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reasons = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
        raise ValueError(f"{path}: its weights do not fit this network: {reasons}") from error
