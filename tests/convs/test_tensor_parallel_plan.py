"""medconv/convs/tensor_parallel_plan.py: which modules a plan names; refusals are in test_tensor_parallel.py,
where processes share them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from medconv.convs.tensor_parallel_plan import largest_share, pair_of, ways_of

MESH: Any = SimpleNamespace(size=lambda: 3)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())


def test_the_first_pattern_whose_way_is_for_the_module_counts() -> None:
    network = nn.ModuleDict({"down": block(), "head": nn.Conv2d(6, 6, 1)})
    assert ways_of(network, MESH, {"^down$": "pair", "head": "out"}) == {"down": "pair", "head": "out"}
    assert ways_of(network, MESH, {r"down\.0": "out", "": "in"}) == {
        "down.0": "out",
        "down.3": "in",
        "head": "in",
    }


def test_a_pair_is_two_convolutions_and_the_norms_between() -> None:
    layers = block()
    first, norms, second = pair_of(layers)
    assert first is layers[0] and norms == [layers[1]] and second is layers[3]


@pytest.mark.parametrize(("channels", "share"), [(6, 2), (7, 3), (9, 3)])
def test_only_the_last_process_has_fewer_channels(channels: int, share: int) -> None:
    assert largest_share(channels, MESH) == share
