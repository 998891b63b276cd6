"""The configured optimizer, fused where possible."""

from functools import partial
from inspect import signature
from typing import Any

import torch

from medconv import config as configs
from medconv.config import Node, TrainerConfig


def build_optimizer(node: Node, trainer: TrainerConfig, fused: bool = True) -> Any:
    """The configured optimizer, fused if it can be.

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
    return configs.errors_with_key("optimizer", optimizer)
