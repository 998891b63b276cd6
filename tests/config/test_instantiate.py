"""medconv/config/instantiate.py: objects from nodes; errors name the key."""

from typing import Any

import pytest
from torch import nn

from medconv.config import ConfigError, build, errors_with_key, iter_targets


def test_a_node_becomes_its_object() -> None:
    layer = build({"_target_": "torch.nn.Linear", "in_features": 2}, "model", out_features=3)
    assert isinstance(layer, nn.Linear) and layer.out_features == 3


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"_target_": "torch.nn.Nothing"}, r"^model: torch\.nn\.Nothing cannot be built: "),
        ({"_target_": "torch.nn.Linear", "size": 2}, r"^model: torch\.nn\.Linear cannot be built: .*size"),
        ({"_target_": "statistics.mean", "_args_": [[]]}, r"^model: mean requires at least one data point$"),
    ],
)
def test_errors_name_the_key(node: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(node, "model")


def test_errors_of_a_later_call_name_the_key_and_the_arguments() -> None:
    sgd = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": -1}, "optimizer")
    with pytest.raises(ConfigError, match=r"^optimizer: .*\(given lr=-1\)$"):
        errors_with_key("optimizer", sgd)([nn.Parameter()])


def test_targets_of_nested_nodes_are_listed_with_their_keys() -> None:
    node = {"_target_": "a.B", "parts": [{"_target_": "c.D"}]}
    assert list(iter_targets(node, "model")) == [
        ("model._target_", "a.B"),
        ("model.parts[0]._target_", "c.D"),
    ]
