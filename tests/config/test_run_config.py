"""medconv/config/run_config.py: unknown keys and wrong types fail before any work, with the full key."""

import json

import pytest
from helpers import tiny
from helpers.configs import derived
from omegaconf.errors import OmegaConfBaseException

from medconv import config
from medconv.config import ConfigError, Derived
from medconv.utils.logging import message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.batch_size=many", "data.batch_size"),
        ("model._target_=monai.networks.nets.Unet2", "model._target_=monai.networks.nets.Unet2"),
        ("data.regions=both", "data.regions"),
        ("perf.compile=maybe", "perf.compile must be true, false or null, got maybe"),
        ("data.spacing_mm=1", "data.spacing_mm must be a list of numbers or null, got 1"),
        ("init.lr_multipliers={head:fast}", "init.lr_multipliers must be values by name"),
        ("trainer.max_steps=many", "trainer.max_steps must be a whole number, got many"),
        ("trainer.detect_anomaly=maybe", "trainer.detect_anomaly must be true or false, got maybe"),
        ("trainer.overfit_batches=few", "trainer.overfit_batches"),
        ("trainer.plugins=[{_target_:torch.nn.Plugin}]", "trainer.plugins[0]._target_=torch.nn.Plugin"),
        ("loss._target_=torch.nn.CrossEntropyLos", "(torch.nn has no CrossEntropyLos)"),
        ("+trainer.default_root_dir=x", "trainer.default_root_dir cannot be set: run.dir"),
    ],
)
def test_wrong_keys_types_and_targets_are_refused_with_the_key(override, expected):
    with pytest.raises(Exception) as error:
        config.validate(tiny.composed(override))
    assert expected in message(error.value)


def test_values_get_the_type_of_the_schema():
    valid = config.validate(tiny.composed("data.batch_size='2'", "perf.timeout_seconds=60"))
    assert valid.data.batch_size == 2
    assert isinstance(valid.perf.timeout_seconds, float)


def test_resolve_fills_in_derived_values():
    checked = config.validate(tiny.composed("data.root=here"))
    assert checked.model["out_channels"] == "${derived.num_classes}" and checked.derived == Derived()
    resolved = config.with_derived(checked, derived())
    assert resolved.model["out_channels"] == 3 and resolved.model["strides"] == [[2, 2, 1]]
    assert type(resolved.model["strides"]) is list
    assert resolved.derived == derived() and resolved.data == checked.data
    assert resolved.data.layout["root"] == "here"
    other = config.with_derived(checked, derived(num_classes=4))
    assert other.model["out_channels"] == 4 and checked.model["out_channels"] == "${derived.num_classes}"


def test_a_resolved_config_survives_a_file():
    resolved = config.with_derived(config.validate(tiny.composed()), derived())
    plain = resolved.plain()
    read = config.from_plain(json.loads(json.dumps(plain)))
    assert read.plain() == {**plain, "trainer": {k: plain["trainer"][k] for k in read.plain()["trainer"]}}
    plain["trainer"]["of_another_version"] = 3
    assert config.from_plain(plain) == read


@pytest.mark.parametrize(
    ("group", "key", "value", "message"),
    [
        ("derived", "patch_size", "wide", "derived.patch_size"),
        ("derived", "num_channels", None, "derived.num_channels"),
        ("derived", "num_channels", "???", "derived.num_channels"),
        ("perf", "turbo", True, "turbo"),
    ],
)
def test_a_config_from_a_file_is_checked(group, key, value, message):
    plain = config.with_derived(config.validate(tiny.composed()), derived()).plain()
    plain[group][key] = value
    with pytest.raises((ConfigError, OmegaConfBaseException), match=message):
        config.from_plain(plain)


def test_texts_of_a_file_stay_texts():
    plain = config.with_derived(config.validate(tiny.composed()), derived()).plain()
    texts = ["${oc.env:HOME}", "a${b", "???", "\\${seed}", "\ue0000\ue001"]
    plain["derived"]["class_names"] = texts
    plain["data"]["root"] = "${oc.env:HOME}"
    plain["model"]["${oc.env:HOME}"] = 1
    read = config.from_plain(plain)
    assert read.derived.class_names == texts
    assert read.data.root == "${oc.env:HOME}"
    assert read.model["${oc.env:HOME}"] == 1


def test_all_wrong_values_are_named_at_once():
    wrong = ("data.batch_size=0", "perf.compile=maybe", "task.overlap=1", "trainer.max_time=soon", "seed=-1")
    with pytest.raises(ConfigError) as error:
        config.validate(tiny.composed(*wrong))
    first, *lines = str(error.value).splitlines()
    assert first == "5 keys of the config are wrong:"
    assert sorted(line.split()[0] for line in lines) == sorted(one.partition("=")[0] for one in wrong)
    assert "  data.batch_size must be at least 1, got 0" in lines


def test_a_seed_that_numpy_refuses_is_named():
    with pytest.raises(ConfigError, match=r"^seed must be at least 0 and at most 4294967295, got 4294967296"):
        config.validate(tiny.composed("seed=4294967296"))


def test_values_that_refer_to_other_keys_are_checked_filled_in():
    assert config.validate(tiny.composed("data.prefetch_factor=${data.num_folds}")).data.prefetch_factor == 5
    with pytest.raises(ConfigError, match=r"data\.num_folds must be at least 2, got 1"):
        config.validate(tiny.composed("data.num_folds=${trainer.check_val_every_n_epoch}"))
    with pytest.raises(OmegaConfBaseException, match=r"nowhere"):
        config.validate(tiny.composed("data.root=${nowhere}"))
