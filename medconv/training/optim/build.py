"""The configured optimizer, fused where possible."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch

from medconv import config as configs
from medconv.config import Values


def build_optimizer(values: Values) -> Any:
    """The optimizer's class with its arguments, fused where it can be and nothing speaks against it.

    fp16's loss scaling and gradient clipping exclude each other in a fused optimizer; torch's fused SGD knows
    no weights that are divided over devices.
    Returns: a function of the parameters.
    """
    optimizer = configs.build(values["optimizer"], "optimizer")
    known = signature(getattr(optimizer, "func", optimizer)).parameters
    clips = bool(values["trainer"]["gradient_clip_val"]) and str(values["trainer"]["precision"]).startswith(
        "16"
    )
    divided = (
        values["trainer"]["strategy"] == "fsdp" and getattr(optimizer, "func", optimizer) is torch.optim.SGD
    )
    given = getattr(optimizer, "keywords", {})
    allowed = values["perf"]["fused_optimizer"] and not clips and not divided
    if allowed and "fused" in known and not {"fused", "foreach"} & given.keys():
        optimizer = partial(optimizer.func, **given, fused=True)
    return configs.errors_with_key("optimizer", optimizer)
