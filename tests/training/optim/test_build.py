"""medconv/training/optim/build.py: optimizers, schedules and groups of parameters."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers.networks import step, unet
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from medconv.config import ConfigError, TrainerConfig
from medconv.models.freeze import check_factors, freeze
from medconv.training.optim import lr_schedulers
from medconv.training.optim.build import (
    _made,
    build_optimizer,
    knows_progress,
    log_schedule,
    schedule_class,
    with_epochs,
    with_lr_multipliers,
)
from medconv.training.optim.lr_schedulers import ProgressSchedule
from medconv.training.optim.muon import Muon

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.01}
SGD = {**ADAMW, "_target_": "torch.optim.SGD"}
MUON = {**ADAMW, "_target_": "medconv.training.optim.muon.Muon"}


@pytest.mark.parametrize("node", [ADAMW, {**SGD, "momentum": 0.9}, MUON])
def test_loaded_states_are_laid_out_as_their_parameters(node):
    """A checkpoint of contiguous weights goes on with channels-last ones: kernels pair places in memory."""

    def stepped(memory_format, state=None, seed=1):
        torch.manual_seed(0)
        layer = nn.Conv3d(8, 8, 3).to(memory_format=memory_format)
        made = build_optimizer(node, trainer())(layer.parameters())
        if state is not None:
            layer.load_state_dict(state[0])
            made.load_state_dict(deepcopy(state[1]))
        generator = torch.Generator().manual_seed(seed)
        for parameter in layer.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        made.step()
        return layer.state_dict(), made.state_dict()

    first = stepped(torch.contiguous_format)
    expected, _ = stepped(torch.contiguous_format, first, seed=2)
    actual, _ = stepped(torch.channels_last_3d, first, seed=2)
    torch.testing.assert_close(actual["weight"].contiguous(), expected["weight"], rtol=1e-4, atol=1e-6)


def test_an_optimizer_may_keep_more_than_states_of_parameters():
    class Counting(torch.optim.SGD):
        def __init__(self, parameters, lr=0.1):
            super().__init__(parameters, lr=lr)
            self.state["all"] = {"steps": 3}

    made = _made(Counting, [nn.Parameter(torch.zeros(2))])
    made.load_state_dict(made.state_dict())
    assert made.state["all"] == {"steps": 3}


def trainer(precision="bf16-mixed", clips=1.0, strategy="auto"):
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
def test_an_optimizer_is_fused_where_it_can_be(arguments, fused):
    optimizer = build_optimizer(*arguments)([torch.nn.Parameter(torch.zeros(2, 2))])
    assert all(bool(group.get("fused")) == fused and group["lr"] == 0.01 for group in optimizer.param_groups)


def test_an_error_names_the_key_and_the_arguments():
    with pytest.raises(
        ConfigError, match=r"^optimizer: Invalid learning rate: -1 \(given lr=-1, fused=True\)"
    ):
        build_optimizer({**ADAMW, "lr": -1}, trainer())([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "ConstantLR"])
def test_a_schedule_of_torch_gets_the_epochs_that_it_needs(name, caplog):
    """Those of the run, unless they are set or nobody knows them."""
    caplog.set_level("INFO")
    node = {"_target_": f"torch.optim.lr_scheduler.{name}", "_partial_": True}
    if name == "ConstantLR":  # has no T_max
        assert with_epochs(node, 7) == node and with_epochs(node, None) == node
        return
    filled = with_epochs(node, 7)
    assert filled == {**node, "T_max": 7} and not caplog.text
    log_schedule(node, filled)
    assert "scheduler.T_max: 7 epochs, the length of the run" in caplog.text
    assert "CosineAnnealingLR moves once per epoch, not per step" in caplog.text
    assert with_epochs({**node, "T_max": 3}, 7)["T_max"] == 3
    with pytest.raises(ConfigError, match=r"^scheduler\.T_max is missing: .*trainer\.max_epochs"):
        with_epochs(node, None)


def test_a_schedule_that_follows_a_metric_is_refused():
    with pytest.raises(ConfigError, match="scheduler=plateau lowers the rate where validation stalls"):
        with_epochs({"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, 7)


class Own(ProgressSchedule):
    """A schedule of a user's own."""


def annotated(optimizer: Optimizer) -> Own:
    return Own(optimizer, lambda progress: 1.0)


def unknown(optimizer):
    return Own(optimizer, lambda progress: 1.0)


@pytest.mark.parametrize(
    ("target", "made"),
    [
        (f"{__name__}.Own", Own),
        ("medconv.training.optim.lr_schedulers.cosine", ProgressSchedule),
        (f"{__name__}.annotated", Own),
        (f"{__name__}.unknown", None),
        ("torch.optim.lr_scheduler.StepLR", StepLR),
    ],
)
def test_the_class_of_a_schedule_is_known_before_it_is_built(target, made):
    assert schedule_class({"_target_": target}) is made
    assert knows_progress({"_target_": target}) == (made not in (None, StepLR))


def test_a_schedule_that_does_not_say_what_it_is_has_one_line(caplog):
    caplog.set_level("INFO")
    target = f"{__name__}.unknown"
    node = {"_target_": target}
    log_schedule(node, with_epochs(node, None))
    assert caplog.messages == [
        f"scheduler: {target} does not say what it returns, such as -> ProgressSchedule; patches do not grow"
    ]


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
