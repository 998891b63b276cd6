"""medconv/config/compose.py: a key or an option that does not exist is named before any work."""

from typing import Any

import pytest

from medconv.config import compose
from medconv.utils.logging import message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.bach_size=2", "there is no key data.bach_size; did you mean data.batch_size"),
        ("trainer.max_step=3", "did you mean trainer.max_steps"),
        ("trainer.callbacks=[]", "trainer.callbacks cannot be set: add callbacks by +callbacks.NAME"),
        (
            "model=resnext",
            "customconv densenet dynunet efficientnet encoder flexibleunet monai_unet resnet segresnet senet",
        ),
        ("loss.class_weights=balanced", "class_weights is a key of loss=bce, cross_entropy"),
        ("perf=turbo", "turbo"),
        ("conv=magic", "magic"),
        ("plan.memory=8", "there is no key plan.memory; did you mean plan.memory_gb"),
        ("scheduler=cosin", "constant cosine exponential multi_step one_cycle plateau poly step"),
        ("optimizer.momentum=0.9", "momentum"),
        ("scheduler.power=2", "power"),
    ],
)
def test_unknown_keys_and_options_are_refused_with_the_nearest_ones(override: str, expected: str) -> None:
    def job(config: Any, settings: Any) -> None:
        raise AssertionError("no job may start")

    with pytest.raises(Exception) as error:
        compose.run_with_config(job, [override])
    assert expected in message(error.value)


def test_a_new_key_needs_a_plus() -> None:
    with pytest.raises(
        compose.config.ConfigError, match=r"there is no key data\.zzz; \+data\.zzz=\.\.\. adds a key"
    ):
        compose.run_with_config(lambda *_: None, ["data.zzz=1"])
