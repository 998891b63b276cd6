"""medconv/training/optim/build.py: which optimizers are fused, and errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medconv.config import ConfigError
from medconv.training.optim.build import build_optimizer

ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.01}
SGD = {**ADAMW, "_target_": "torch.optim.SGD"}
MUON = {**ADAMW, "_target_": "medconv.training.optim.muon.Muon"}


def values(optimizer: dict[str, Any], fused: bool = True, **trainer: Any) -> dict[str, Any]:
    defaults = {"gradient_clip_val": 1.0, "precision": "bf16-mixed", "strategy": "auto"}
    return {
        "optimizer": optimizer,
        "trainer": {**defaults, **trainer},
        "perf": {"fused_optimizer": fused},
    }


@pytest.mark.parametrize(
    ("config", "fused"),
    [
        (values(ADAMW), True),
        (values(ADAMW, fused=False), False),
        (values({**ADAMW, "foreach": True}), False),  # set by the user
        (values(ADAMW, precision="16-mixed"), False),  # fp16's loss scaling with gradient clipping
        (values(ADAMW, precision="16-mixed", gradient_clip_val=None), True),
        (values(SGD), True),
        (values(SGD, strategy="fsdp"), False),
        (values(ADAMW, strategy="fsdp"), True),
        (values(MUON), False),  # has no such argument
    ],
)
def test_an_optimizer_is_fused_where_it_can_be(config: dict[str, Any], fused: bool) -> None:
    optimizer = build_optimizer(config)([torch.nn.Parameter(torch.zeros(2, 2))])
    assert all(bool(group.get("fused")) == fused and group["lr"] == 0.01 for group in optimizer.param_groups)


def test_an_error_names_the_key_and_the_arguments() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer: Invalid learning rate: -1 \(given lr=-1, fused=True\)"
    ):
        build_optimizer(values({**ADAMW, "lr": -1}))([torch.nn.Parameter(torch.zeros(2))])
