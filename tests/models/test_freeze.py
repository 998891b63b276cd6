"""medconv/models/freeze.py: frozen parameters stay, and wrong patterns are named."""

from copy import deepcopy

import pytest
import torch
from helpers.networks import step, unet
from torch import nn

from medconv.models.freeze import check_factors, freeze, has_fixed_norms
from medconv.performance.switches import apply_switches
from medconv.training.optim.muon import Muon
from medconv.utils.errors import ArgumentError


@pytest.mark.parametrize(
    "switches", [{}, {"activation_checkpointing": "blocks"}, {"activation_checkpointing": "pointwise"}]
)
def test_only_frozen_parameters_and_statistics_stay_in_training(switches):
    network = unet()
    line = freeze(network, ["^encoder"])
    assert line.startswith("12 of 24 parameters, 0.00") and line.endswith("the statistics of 4 batch norms")
    apply_switches(network, channels_last=True, fast_norm=True, **switches)
    network.train()
    before = deepcopy(network.state_dict())
    clone = deepcopy(network).train()
    assert not clone.encoder[0][1].training and clone.decoder[0][1].training
    optimizer = Muon([p for p in network.parameters() if p.requires_grad])
    for _ in range(2):
        step(network, optimizer)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("encoder"), name
    assert all(p.grad is None for p in network.encoder.parameters())


def test_a_frozen_network_can_be_pickled(tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))
    freeze(network, ["^[01]"])
    torch.save(network, tmp_path / "network.pt")
    loaded = torch.load(tmp_path / "network.pt", weights_only=False).train()
    assert not loaded[1].training and loaded[2].training
    assert deepcopy(network).train()[1].training is False
    assert has_fixed_norms(network) and not has_fixed_norms(nn.BatchNorm2d(2))


def test_a_norm_whose_scale_still_learns_keeps_its_mode():
    network = unet()
    assert "batch norms" not in freeze(network, [r"encoder\.0\.1\.weight"])
    assert network.train().encoder[0][1].training


def test_patterns_match_norms_without_parameters_by_their_statistics():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False), nn.Conv2d(2, 2, 1))
    assert freeze(network, ["^[01]"]).endswith("the statistics of 1 batch norms")
    assert not network.train()[1].training


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["encodr"], r"^freeze: 'encodr' matches no parameter to train; there are encoder"),
        (["backbone"], "there are encoder, down, up, decoder, head"),
        ([r"^decoder\.4"], r"there are decoder\.0"),
        ("encoder", r"^freeze must be a list of regular expressions, such as \[encoder\], got encoder"),
        (["("], r"^freeze: '\(' is not a regular expression"),
        (["encoder", "e", "up", "down", "head"], "freezes the whole network, nothing is left to train"),
    ],
)
def test_wrong_patterns_are_refused(patterns, words):
    with pytest.raises(ArgumentError, match=words):
        freeze(unet(), patterns)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"encodr": 0.1}, r"^lr_multipliers: 'encodr' matches no parameter to train; there are encoder"),
        ({"encoder": 0.0}, "must have a positive factor, got 0.0; to freeze it, use freeze"),
        ({"encoder": float("nan")}, "must have a positive factor, got nan"),
        ({"down": 0.1}, "matches no parameter to train"),
    ],
)
def test_wrong_factors_are_refused(factors, words):
    network = unet()
    freeze(network, ["down"])
    with pytest.raises(ArgumentError, match=words):
        check_factors(factors, network)
