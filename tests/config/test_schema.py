"""medconv/config/schema.py: unknown keys and wrong types fail before any work, with the full key."""

from typing import Any

import pytest
from helpers import tiny
from omegaconf import OmegaConf

from medconv import config
from medconv.utils.logging import message


def compose(*overrides: str) -> Any:
    with tiny.initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        return tiny.compose("train", list(overrides))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+data.bach_size=2", "data.bach_size"),
        ("data.batch_size=many", "data.batch_size"),
        ("model._target_=monai.networks.nets.Unet2", "model._target_=monai.networks.nets.Unet2"),
        ("data.regions=both", "data.regions"),
        ("perf.compile=maybe", "perf.compile: Value 'maybe' is not a valid bool"),
        ("loss._target_=torch.nn.CrossEntropyLos", "loss._target_"),
    ],
)
def test_wrong_keys_types_and_targets_are_refused_with_the_key(override: str, expected: str) -> None:
    with pytest.raises(Exception) as error:
        config.validate(compose(override))
    assert expected in message(error.value)


def test_values_get_the_type_of_the_schema() -> None:
    valid = config.validate(compose("data.batch_size='2'", "perf.timeout_seconds=60"))
    assert valid.data.batch_size == 2
    assert isinstance(valid.perf.timeout_seconds, float)


def test_resolve_fills_in_derived_values_and_returns_plain_lists() -> None:
    composed = OmegaConf.create({"model": {"out_channels": "${derived.num_classes}", "strides": [2]}})
    values = config.resolve(composed, {"num_classes": 3})
    assert values == {"model": {"out_channels": 3, "strides": [2]}, "derived": {"num_classes": 3}}
    assert type(values["model"]["strides"]) is list
    assert "derived" not in composed
