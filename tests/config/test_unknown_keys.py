"""medconv/config/unknown_keys.py: names that no config has are refused with the nearest ones."""

import re
from typing import Any

import pytest

from medconv.config import ConfigError
from medconv.config.unknown_keys import check_names, nearest, takes_new_keys


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"data": {"bach_size": 2}}, "there is no key data.bach_size; did you mean data.batch_size or"),
        ({"modl": {}}, "there is no key modl; did you mean model?"),
        ({"task": "regression"}, "task=regression: task is no single value; set one of its keys"),
        ({"loss": None}, "loss=null: loss is no single value"),
        ({"trainer": {"callbacks": []}}, "trainer.callbacks cannot be set: add callbacks by"),
        ({"trainer": {"max_stepz": 1}}, "there is no key trainer.max_stepz; did you mean trainer.max_steps"),
        ({"trainer": {"gradient_clip": 1}}, "did you mean trainer.gradient_clip_"),
        ({"derived": {"size_of": 1}}, "there is no key derived.size_of"),
        (
            {"model": {"stages": [{"width": "${derived.in_channels}"}]}},
            "model.stages[0].width: there is no derived.in_channels; derived has num_channels, num_classes,",
        ),
    ],
)
def test_unknown_names_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_names(values)


def test_words_of_an_abbreviation_lead_to_it() -> None:
    names = ["optimizer.lr", "optimizer.weight_decay", "optimizer"]
    assert nearest("optimizer.learning_rate", names) == ["optimizer.lr"]
    assert nearest("optimizer.weight_dekay", names) == ["optimizer.weight_decay"]


def test_names_of_typed_groups_and_any_name_of_a_class_are_known() -> None:
    check_names(
        {
            "seed": 1,
            "ckpt_path": None,
            "data": {"batch_size": 2},
            "model": {"any": 1, "in_channels": "${derived.num_channels}"},
            "conv": "${other}",
            "trainer": {"detect_anomaly": True, "overfit_batches": 1},
        }
    )


def test_keys_can_be_added_to_classes_alone() -> None:
    assert takes_new_keys("model.width") and takes_new_keys("callbacks.mine._target_")
    assert not takes_new_keys("data.width") and not takes_new_keys("width")
