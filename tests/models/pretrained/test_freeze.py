"""medconv/models/pretrained/freeze.py and rates of single layers: what stays, what learns slower, in every
optimizer and schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from medconv.config import ConfigError
from medconv.models.pretrained.freeze import check_factors, freeze
from medconv.models.unet import UNet
from medconv.performance.switches import apply_switches
from medconv.training.optim import lr_schedulers
from medconv.training.optim.muon import Muon
from medconv.training.optim.param_groups import with_lr_multipliers

FACTORS = {"encoder": 0.1, "decoder": 0.5, "encoder.0": 7.0}


def unet(norm: str = "batch") -> UNet:
    torch.manual_seed(0)
    return UNet(2, 1, 2, (4, 8), (2,), norm=norm)


def step(network: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    network(torch.rand(2, 1, 16, 16)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "switches", [{}, {"activation_checkpointing": "blocks"}, {"activation_checkpointing": "pointwise"}]
)
def test_frozen_parameters_and_statistics_stay_and_others_do_not(switches: dict[str, Any]) -> None:
    network = unet()
    line = freeze(network, ["^encoder"])
    assert line.startswith("init.freeze: 12 of 24 parameters, 0.00") and line.endswith(
        "the statistics of 4 batch norms"
    )
    apply_switches(network, channels_last=True, fast_norm=True, **switches)
    network.train()
    before = copy.deepcopy(network.state_dict())
    copied = copy.deepcopy(network).train()
    assert not copied.encoder[0][1].training and copied.decoder[0][1].training
    optimizer = Muon([p for p in network.parameters() if p.requires_grad])
    for _ in range(2):
        step(network, optimizer)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("encoder"), name
    assert all(p.grad is None for p in network.encoder.parameters())


def test_a_norm_whose_scale_still_learns_keeps_its_mode() -> None:
    network = unet()
    assert "batch norms" not in freeze(network, [r"encoder\.0\.1\.weight"])
    assert network.train().encoder[0][1].training


def test_norms_without_parameters_are_known_by_their_statistics() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False), nn.Conv2d(2, 2, 1))
    assert freeze(network, ["^[01]"]).endswith("the statistics of 1 batch norms")
    assert not network.train()[1].training


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["encodr"], r"init\.freeze: 'encodr' matches no parameter to train; there are encoder"),
        (["backbone"], "there are encoder, down, up, decoder, head"),
        ([r"^decoder\.4"], r"there are decoder\.0"),
        ("encoder", r"init\.freeze must be a list of regular expressions, such as \[encoder\], got encoder"),
        (["("], r"init\.freeze: '\(' is not a regular expression"),
        (["encoder", "e", "up", "down", "head"], "freezes the whole network, nothing is left to train"),
    ],
)
def test_patterns_that_are_wrong(patterns: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        freeze(unet(), patterns)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"encodr": 0.1}, r"init\.lr_multipliers: 'encodr' matches no parameter to train; there are encoder"),
        ({"encoder": 0.0}, "must have a positive factor, got 0.0; to freeze it, use init.freeze"),
        ({"encoder": float("nan")}, "must have a positive factor, got nan"),
        ({"down": 0.1}, "matches no parameter to train"),
    ],
)
def test_factors_that_are_wrong(factors: dict[str, float], words: str) -> None:
    network = unet()
    freeze(network, ["down"])
    with pytest.raises(ConfigError, match=words):
        check_factors(factors, network)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "muon": lambda p: Muon(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [lr_schedulers.cosine, lr_schedulers.plateau])
def test_each_layer_learns_at_its_rate_through_a_schedule(name: str, schedule: Callable[..., Any]) -> None:
    network = unet()
    freeze(network, ["up"])
    check_factors(FACTORS, network)
    optimizer, scheduler = started(network, name, schedule)
    for _ in range(4):
        step(network, optimizer)
        scheduler.step()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    base = rates[id(network.head.weight)]
    assert 0 < base <= 0.1 and (schedule is lr_schedulers.plateau or base < 0.1)
    for key, parameter in network.named_parameters():
        factor = {"encoder": 0.1, "decoder": 0.5}.get(
            key.split(".")[0], 1.0
        )  # the first pattern that is found counts
        assert (rates.get(id(parameter)) == pytest.approx(base * factor)) == (not key.startswith("up")), key
    again, scheduler_again = started(network, name, schedule)
    again.load_state_dict(optimizer.state_dict())
    scheduler_again.load_state_dict(scheduler.state_dict())
    assert [g["lr"] for g in again.param_groups] == pytest.approx([g["lr"] for g in optimizer.param_groups])


def started(network: nn.Module, name: str, schedule: Callable[..., Any]) -> tuple[Any, Any]:
    make = with_lr_multipliers(OPTIMIZERS[name], network, FACTORS)
    optimizer = make(p for p in network.parameters() if p.requires_grad)
    scheduler = schedule(optimizer)
    scheduler.total_steps = 10
    return optimizer, scheduler


def test_parameters_that_are_not_the_networks_learn_at_the_full_rate() -> None:
    network, head = unet(), nn.Parameter(torch.zeros(2))
    optimizer = with_lr_multipliers(OPTIMIZERS["sgd"], network, {".": 0.5})([*network.parameters(), head])
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


def test_a_step_of_muon_in_groups_is_that_of_one_group() -> None:
    """Its kernels and vectors, whatever group they are in."""
    one, other = unet("instance"), unet("instance")
    plain = Muon(one.parameters(), lr=0.1)
    grouped = Muon(
        [
            {"params": other.encoder.parameters()},
            {"params": [p for n, p in other.named_parameters() if "encoder" not in n]},
        ],
        lr=0.1,
    )
    assert [group["kernels"] for group in grouped.param_groups] == [True, False, True, False]
    for network, optimizer in ((one, plain), (other, grouped)):
        torch.manual_seed(1)
        step(network, optimizer)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
