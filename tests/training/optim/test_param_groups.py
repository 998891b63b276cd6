"""medconv/training/optim/build.py: each layer learns at its own rate, with any optimizer and schedule."""

import pytest
import torch
from helpers.networks import step, unet
from torch import nn

from medconv.models.freeze import check_factors, freeze
from medconv.training.optim import lr_schedulers
from medconv.training.optim.build import with_lr_multipliers
from medconv.training.optim.muon import Muon

FACTORS = {"encoder": 0.1, "decoder": 0.5, "encoder.0": 7.0}
OPTIMIZERS = {
    "muon": lambda p: Muon(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [lr_schedulers.cosine, lr_schedulers.constant])
def test_each_layer_learns_at_its_own_rate_through_a_schedule(name, schedule):
    network = unet()
    freeze(network, ["up"])
    check_factors(FACTORS, network)
    optimizer, scheduler = started(network, name, schedule)
    for _ in range(4):
        step(network, optimizer)
        scheduler.step()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    base = rates[id(network.head.weight)]
    assert 0 < base <= 0.1 and (schedule is lr_schedulers.constant or base < 0.1)
    for key, parameter in network.named_parameters():
        # the first pattern that matches counts, so that "encoder.0" has no effect
        factor = {"encoder": 0.1, "decoder": 0.5}.get(key.split(".")[0], 1.0)
        assert (rates.get(id(parameter)) == pytest.approx(base * factor)) == (not key.startswith("up")), key
    again, scheduler_again = started(network, name, schedule)
    again.load_state_dict(optimizer.state_dict())
    scheduler_again.load_state_dict(scheduler.state_dict())
    assert [g["lr"] for g in again.param_groups] == pytest.approx([g["lr"] for g in optimizer.param_groups])


def started(network, name, schedule):
    make = with_lr_multipliers(OPTIMIZERS[name], network, FACTORS)
    optimizer = make(p for p in network.parameters() if p.requires_grad)
    scheduler = schedule(optimizer)
    scheduler.set_length(10)
    return optimizer, scheduler


def test_parameters_outside_the_network_learn_at_the_full_rate():
    network, head = unet(), nn.Parameter(torch.zeros(2))
    optimizer = with_lr_multipliers(OPTIMIZERS["sgd"], network, {".": 0.5})([*network.parameters(), head])
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
