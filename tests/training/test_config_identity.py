"""medconv/training/identity.py: which keys may change when a run resumes."""

from dataclasses import replace

from medconv.config.schema import RunConfig
from medconv.training.identity import config_differences


def test_keys_that_change_what_is_trained_are_named():
    config = RunConfig()
    same = replace(config, data=replace(config.data, num_workers=3, store="blosc2"), tags=["x"])
    other = replace(same, seed=7)
    assert config_differences(config.plain(), same.plain()) == []
    assert config_differences(config.plain(), other.plain()) == [f"seed: {config.seed} there, 7 now"]


def test_keys_of_another_version_of_lightning_do_not_count():
    earlier = {"seed": 0, "trainer": {"precision": "32-true", "gone": True}}
    now = {"seed": 0, "trainer": {"precision": "32-true", "new": True}}
    assert config_differences(earlier, now) == []
    other = {"seed": 0, "trainer": {"precision": "16-mixed"}}
    assert config_differences(earlier, other) == ["trainer.precision: 32-true there, 16-mixed now"]


def test_a_run_resumes_with_other_loggers_and_callbacks():
    """Also with none, whose group is empty."""
    tensorboard = {"tensorboard": {"_target_": "x"}}
    plain = [replace(RunConfig(), logger=node, callbacks=node).plain() for node in (tensorboard, {})]
    assert config_differences(*plain) == config_differences(*reversed(plain)) == []
