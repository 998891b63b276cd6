"""medconv/features/pretrained/match.py: prefixes of names, in the file and in the network."""

from __future__ import annotations

import pytest
import torch
from helpers.pretrained import DERIVED, assert_same, save, unet
from torch import nn

from medconv.features.pretrained.load import load


def nested(state):
    """One mapping per module."""
    tree = {}
    for name, value in state.items():
        *parts, last = name.split(".")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


WRAPPINGS = {
    "plain": lambda state: state,
    "DataParallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
    "Lightning": lambda state: {
        "epoch": 3,
        "loops": {},
        "state_dict": {f"model.net.{name}": value for name, value in state.items()},
        "optimizer_states": [{"state": {0: {"mean": torch.zeros(3)}}}],
    },
    "MONAI, with an optimizer": lambda state: {
        "optimizer": {"state": {0: {"m": torch.ones(2)}}},
        "model": state,
    },
    "an unknown name": lambda state: {"net_g_weights": {"wrapped": state}},
    "nested mappings": nested,
    "beside a wider teacher": lambda state: {"teacher": unet(widths=(6, 8)).state_dict(), "student": state},
    "first of two": lambda state: {"model": state, "ema": {name: value + 1 for name, value in state.items()}},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_names_match_whatever_the_file_puts_before_them(wrapping, tmp_path):
    source, network = unet(seed=1), unet(seed=2)
    report = load(
        network, save(tmp_path / "file.pth", WRAPPINGS[wrapping](dict(source.state_dict()))), DERIVED
    )
    assert_same(network, source)
    assert report.share == 1 and not report.random and not report.reshaped


class Larger(nn.Module):
    """Has our U-Net as a part."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.classifier = unet(seed=5), nn.Linear(3, 2)


def test_a_file_may_cover_a_part_of_a_larger_network(tmp_path):
    source, network = unet(seed=1), Larger()
    before = network.classifier.weight.detach().clone()
    report = load(network, save(tmp_path / "file.pt", {"module": source.state_dict()}), DERIVED)
    assert_same(network.backbone, source)
    assert torch.equal(network.classifier.weight, before)
    assert list(report.random) == ["classifier.weight", "classifier.bias"]
