"""medconv/training/optim/build.py: which optimizers are fused, and errors that name the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medconv.config import ConfigError, TrainerConfig
from medconv.training.optim.build import build_optimizer

ADAMW: dict[str, Any] = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.01}
SGD = {**ADAMW, "_target_": "torch.optim.SGD"}
MUON = {**ADAMW, "_target_": "medconv.training.optim.muon.Muon"}


def trainer(
    precision: str = "bf16-mixed", clips: float | None = 1.0, strategy: str = "auto"
) -> TrainerConfig:
    return TrainerConfig(precision=precision, gradient_clip_val=clips, strategy=strategy)


@pytest.mark.parametrize(
    ("arguments", "fused"),
    [
        ((ADAMW, trainer()), True),
        ((ADAMW, trainer(), False), False),
        (({**ADAMW, "foreach": True}, trainer()), False),  # set by the user
        ((ADAMW, trainer("16-mixed")), False),  # fp16's loss scaling with gradient clipping
        ((ADAMW, trainer("16-mixed", clips=None)), True),
        ((SGD, trainer()), True),
        ((SGD, trainer(strategy="fsdp")), False),
        ((ADAMW, trainer(strategy="fsdp")), True),
        ((MUON, trainer()), False),  # has no such argument
    ],
)
def test_an_optimizer_is_fused_where_it_can_be(arguments: Any, fused: bool) -> None:
    optimizer = build_optimizer(*arguments)([torch.nn.Parameter(torch.zeros(2, 2))])
    assert all(bool(group.get("fused")) == fused and group["lr"] == 0.01 for group in optimizer.param_groups)


def test_an_error_names_the_key_and_the_arguments() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer: Invalid learning rate: -1 \(given lr=-1, fused=True\)"
    ):
        build_optimizer({**ADAMW, "lr": -1}, trainer())([torch.nn.Parameter(torch.zeros(2))])
