"""medconv/config/schema.py: keys of `trainer` are the arguments of Lightning's Trainer."""

from inspect import signature

import pytest
from lightning import Trainer
from omegaconf import OmegaConf

from medconv.config import TrainerConfig, conf_dir
from medconv.config.keys import declared_keys
from medconv.config.schema import set_elsewhere, trainer_schema

KEYS = {key.name: key for key in declared_keys(TrainerConfig)}


class LaterTrainer(Trainer):
    """As if a later version of Lightning had further arguments."""

    def __init__(self, *, new_limit: int | None = 3, new_object: Trainer | None = None) -> None: ...


def test_arguments_of_a_later_trainer_become_keys_with_their_types():
    schema = OmegaConf.structured(trainer_schema(LaterTrainer))
    OmegaConf.set_readonly(schema, False)
    assert schema.new_limit == 3 and schema.new_object is None and schema.accelerator == "auto"
    with pytest.raises(Exception, match=r"'many' of type 'str' could not be converted to Integer"):
        schema.new_limit = "many"


def test_every_argument_of_the_trainer_is_a_key_or_says_where_it_is_set():
    option = OmegaConf.load(conf_dir() / "trainer/default.yaml")
    for key in signature(Trainer).parameters:
        assert (key in option) != (set_elsewhere(f"trainer.{key}") is not None), key


def test_a_precision_may_be_a_number_or_null():
    assert KEYS["precision"].problem(32) is None and KEYS["precision"].problem(None) is None


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("devices", [None, 2, "auto", [0, 1]], [0.5, {"a": 1}]),
        ("deterministic", [True, "warn", None], ["yes", 1]),
        ("limit_val_batches", [0, 0.5, 3, None], [-1, "half"]),
        ("val_check_interval", [0.5, 10, "00:01:00:00", None], [0, -1]),
        ("max_epochs", [None, -1, 3], [-2]),
    ],
)
def test_what_keys_take(name, good, bad):
    assert [KEYS[name].problem(value) for value in good] == [None] * len(good)
    assert all(KEYS[name].problem(value) for value in bad)
