"""The configured optimizer, fused where possible."""

from collections.abc import Callable, Set
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.optim import Optimizer

from medconv import config as configs
from medconv.config import Node, TrainerConfig


def build_optimizer(node: Node, trainer: TrainerConfig, fused: bool = True) -> Any:
    """The configured optimizer, fused if it can be. Its settings stay as they are when a state is loaded.

    A fused optimizer cannot combine fp16's loss scaling with gradient clipping; torch's fused SGD cannot take
    weights sharded by FSDP.
    Args: node: `optimizer`. fused: whether it may be.
    Returns: a function from parameters to the optimizer.
    """
    optimizer = configs.build(node, "optimizer")
    make = getattr(optimizer, "func", optimizer)
    clips_fp16 = bool(trainer.gradient_clip_val) and str(trainer.precision).startswith("16")
    shards_sgd = trainer.strategy == "fsdp" and make is torch.optim.SGD
    settings = getattr(optimizer, "keywords", {})
    allowed = fused and not clips_fp16 and not shards_sgd
    if allowed and "fused" in signature(make).parameters and not {"fused", "foreach"} & settings.keys():
        optimizer = partial(make, **settings, fused=True)
    return partial(_keeping, configs.errors_with_key("optimizer", optimizer), settings.keys() - {"lr"})


def _keeping(make: Callable[..., Optimizer], settings: Set[str], parameters: Any) -> Optimizer:
    """An optimizer whose `load_state_dict` does not replace these settings, which torch's does."""
    optimizer = make(parameters)
    kept = [{key: group[key] for key in settings & group.keys()} for group in optimizer.param_groups]

    def restore(loaded: Optimizer) -> None:
        for group, values in zip(loaded.param_groups, kept, strict=True):
            group.update(values)

    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer
