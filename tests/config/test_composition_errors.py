"""medconv/config/composition_errors.py: a key or an option that does not exist is named before any work."""

import re
from types import SimpleNamespace

import pytest

from medconv.config import ConfigError, compose, composition_errors
from medconv.utils.logging import message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.bach_size=2", "there is no key data.bach_size; did you mean data.batch_size"),
        ("trainer.max_step=3", "did you mean trainer.max_steps"),
        ("trainer.callbacks=[]", "trainer.callbacks cannot be set: add callbacks by +callbacks.NAME"),
        (
            "model=resnext",
            "customconv densenet dynunet efficientnet encoder flexibleunet mednext monai_unet resenc resnet segresnet",
        ),
        ("loss.class_weights=balanced", "class_weights is a key of loss=bce, cross_entropy"),
        ("perf=turbo", "turbo"),
        ("conv=magic", "magic"),
        ("plan.memory=8", "there is no key plan.memory; did you mean plan.memory_gb"),
        ("scheduler=cosin", "constant cosine exponential multi_step one_cycle plateau poly step"),
        ("optimizer.momentum=0.9", "momentum"),
        (
            "experiment=hipocampus",
            "there is no experiment=hipocampus; did you mean hippocampus? Options: hippo",
        ),
        ("hparams_search=typo", "there is no hparams_search=typo; Options: recipe"),
        (
            "logger=aim",
            "there is no logger=aim; It needs pkg_resources, which setuptools has no more. Options",
        ),
        ("trainer=dpp", "did you mean ddp"),
        (
            "hydra/launcher=joblib",
            "medconv starts the jobs of a sweep itself; expected hydra/launcher=basic or",
        ),
        ("hydra/sweeper=ax", "expected hydra/sweeper=basic or optuna"),
        (
            "hydra.run.dir=x",
            "hydra.run.dir=x: Hydra's folders are not used; run.dir=FOLDER is a run's folder",
        ),
        ("hydra.sweep.subdir=x", "Hydra's folders are not used"),
        ("scheduler.power=2", "power"),
    ],
)
def test_unknown_keys_and_options_are_refused_with_the_nearest_ones(override: str, expected: str) -> None:
    with pytest.raises(Exception) as error:
        compose.compose([override])
    assert expected in message(error.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+trainer.foo=1", "there is no key trainer.foo; --cfg job prints all keys"),
        ("+trainer.max_stepz=1", "there is no key trainer.max_stepz; did you mean trainer.max_steps"),
        ("++data.bach_size=1", "there is no key data.bach_size; did you mean data.batch_size"),
        ("+mykey=1", "there is no key mykey; --cfg job prints all keys"),
        ("+scheduled=1", "there is no key scheduled; did you mean schedule or scheduler?"),
        ("+trainer.logger=false", "trainer.logger cannot be set: choose loggers by logger=NAME"),
        ("+experiment=nunet", "there is no experiment=nunet; did you mean nnunet? Options: hippo"),
        (
            "+experiment=nnunet",
            "+experiment=nnunet: experiment has an option already; write experiment=nnunet to choose",
        ),
        ("+seed=1", "+seed=1: there is a seed already; write seed=1 to change it"),
        (
            "+model.strides=[2,2]",
            "+model.strides=[2,2]: there is a model.strides already; write model.strides=[2,2] to change it",
        ),
    ],
)
def test_a_key_that_no_config_has_cannot_be_added(
    override: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        compose.compose([override])
    assert "Error executing job" not in capsys.readouterr().err  # Hydra's own line


def test_values_that_hydra_cannot_read_without_assertions_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimized = SimpleNamespace(flags=SimpleNamespace(optimize=1))
    monkeypatch.setattr(composition_errors, "sys", optimized)
    composition_errors.check_hydra_settings(["tags=[a]", "seed=1"])
    for argument in ("plan={size: tiny}", "seed=range(0,2)"):
        with pytest.raises(ConfigError, match=f"{re.escape(argument)}: Hydra cannot read such a value under"):
            composition_errors.check_hydra_settings([argument])


def test_all_keys_that_no_config_has_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        compose.compose(["+data.x1=1", "+perf.x2=2"])
    first, *lines = str(error.value).splitlines()
    assert first == "2 keys of the config are wrong:"
    assert sorted(lines) == [
        f"  there is no key {key}; --cfg job prints all keys" for key in ("data.x1", "perf.x2")
    ]


def test_a_new_key_of_a_class_needs_a_plus() -> None:
    with pytest.raises(ConfigError, match=r"there is no key model\.zzz; \+model\.zzz=\.\.\. adds a key"):
        compose.compose(["model.zzz=1"])
    with pytest.raises(ConfigError, match=r"there is no key data\.zzz; --cfg job prints all keys$"):
        compose.compose(["data.zzz=1"])
