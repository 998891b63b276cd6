"""medconv/training/config_identity.py: which keys may change when a run resumes."""

from dataclasses import replace

from medconv.config.schema import RunConfig
from medconv.training.config_identity import config_differences


def test_keys_that_change_what_is_trained_are_named() -> None:
    config = RunConfig()
    same = replace(config, data=replace(config.data, num_workers=3), tags=["x"])
    other = replace(same, seed=7)
    assert config_differences(config.plain(), same.plain()) == []
    assert config_differences(config.plain(), other.plain()) == [f"seed: {config.seed} there, 7 now"]


def test_keys_of_another_version_of_lightning_do_not_count() -> None:
    earlier = RunConfig().plain()
    earlier["trainer"] = {**earlier["trainer"], "of_another_version": 1}
    assert config_differences(earlier, RunConfig().plain()) == []
