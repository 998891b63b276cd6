"""medconv/config/unknown_keys.py: names that no config has are refused with the nearest ones."""

import re
import sys
from types import SimpleNamespace

import pytest

from medconv.config import ConfigError, compose, unknown_keys
from medconv.config.schema import conf_dir
from medconv.config.unknown_keys import (
    _KEYS,
    _OPTIONS,
    _known_names,
    _no_key,
    _no_option,
    check_names,
    nearest,
    same_here,
    takes_new_keys,
    unknown_key,
)
from medconv.utils.logging import message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"modl": {}}, "there is no key modl; did you mean model?"),
        ({"loss": None}, "loss=null: loss is a group"),
        ({"trainer": {"gradient_clip": 1}}, "did you mean trainer.gradient_clip_"),
        ({"derived": {"size_of": 1}}, "there is no key derived.size_of"),
        (
            {"model": {"stages": [{"width": "${derived.in_channels}"}]}},
            "model.stages[0].width: there is no derived.in_channels; derived has num_channels, num_classes,",
        ),
    ],
)
def test_unknown_names_are_refused(values, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_names(values)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("optimizer.weight_dekay", "optimizer.weight_decay"),
        ("lr", "optimizer.lr"),
        ("trainer.learning_rate", "optimizer.lr"),
        ("epochs", "trainer.max_epochs"),
        ("max_steps", "trainer.max_steps"),
        ("trainer.gpus", "trainer.devices"),
        ("devices", "trainer.devices"),
        ("batch_size", "data.batch_size"),
        ("data.path", "data.root"),
    ],
)
def test_a_key_of_another_framework_leads_to_ours(key, expected):
    names = [*_known_names(), "optimizer.weight_decay"]
    assert nearest(key, names) == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.widht=3"], "there is no key model.widht; did you mean +model.width?"),
        (["model.width=3"], "there is no key model.width yet; +model.width=... sets this argument"),
        (["model.zzz=3"], "there is no key model.zzz; Net takes width"),
        (
            ["model.zzz=3", "model._target_=widths.Open"],
            "there is no key model.zzz; +model.zzz=... adds an argument that the class",
        ),
    ],
)
def test_arguments_of_the_own_class_are_suggested(arguments, expected, tmp_path, monkeypatch):
    (tmp_path / "widths.py").write_text(
        "class Net:\n    def __init__(self, width=16): ...\n"
        "class Open:\n    def __init__(self, **settings): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(ConfigError, match=re.escape(expected)):
        compose.compose(["model._target_=widths.Net", *arguments])


def test_names_of_typed_groups_and_any_name_of_a_class_are_known():
    check_names(
        {
            "seed": 1,
            "data": {"batch_size": 2},
            "model": {"any": 1, "in_channels": "${derived.num_channels}"},
            "conv": "${other}",
            "trainer": {"detect_anomaly": True, "overfit_batches": 1},
        }
    )


def test_keys_can_be_added_to_classes_alone():
    assert takes_new_keys("model.width") and takes_new_keys("callbacks.mine._target_")
    assert not takes_new_keys("data.width") and not takes_new_keys("width")


def test_every_launcher_that_conf_has_is_taken():
    options = sorted(file.stem for file in (conf_dir() / "hydra/launcher").glob("*.yaml"))
    assert options == ["lsf", "pbs", "sge", "slurm"]
    unknown_keys.check_hydra_settings([f"hydra/launcher={name}" for name in options])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("data.bach_size=2", "there is no key data.bach_size; did you mean data.batch_size"),
        ("trainer.max_step=3", "did you mean trainer.max_steps"),
        ("trainer.callbacks=[]", "trainer.callbacks cannot be set: add callbacks by +callbacks.NAME"),
        (
            "model=resnext",
            "customconv densenet dynunet efficientnet encoder flexibleunet mednext monai_unet resenc resnet segresnet",
        ),
        ("loss.class_weights=balanced", "class_weights is a key of loss=bce, cross_entropy"),
        ("augmentation.p.elastic=0.3", "p.elastic is a key of augmentation=strong"),
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
            "there is no logger=aim; It needs pkg_resources, which setuptools no longer has. Options",
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
        ("+trainer.foo=1", "there is no key trainer.foo; --cfg job prints all keys"),
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
        ("model=customconv,resenc", "model=customconv,resenc: several values; for a sweep over them add -m"),
        ("data.fold=0,1", "data.fold=0,1: several values; for a sweep over them add -m"),
        ("model = resenc", "cannot read model: write KEY=VALUE, without spaces around ="),
        ("model.zzz=1", "there is no key model.zzz; UNet takes spatial_dims, in_channels, "),
        ("data.zzz=1", "there is no key data.zzz; --cfg job prints all keys"),
        ("task=regression", "task=regression: task is a group; set one of its keys"),
        ("+data.x1=1 +perf.x2=2", "2 keys of the config are wrong:\n  there is no key"),
    ],
)
def test_lines_with_unknown_keys_and_options_are_refused_with_the_nearest_ones(line, expected, capsys):
    with pytest.raises(ConfigError) as error:
        compose.compose(line.split())
    assert expected in message(error.value)
    assert "Error executing job" not in capsys.readouterr().err  # Hydra's own line


def test_values_that_hydra_cannot_read_without_assertions_are_refused(monkeypatch):
    optimized = SimpleNamespace(flags=SimpleNamespace(optimize=1))
    monkeypatch.setattr(unknown_keys, "sys", optimized)
    unknown_keys.check_hydra_settings(["tags=[a]", "seed=1"])
    for argument in ("plan={size: tiny}", "seed=range(0,2)"):
        with pytest.raises(ConfigError, match=f"{re.escape(argument)}: Hydra cannot read such a value under"):
            unknown_keys.check_hydra_settings([argument])


def test_the_words_that_are_recommended_exist():
    """Each GROUP=OPTION and each key of the sentences."""
    text = " ".join([*_KEYS.values(), *_OPTIONS.values()])
    options = re.findall(r"\b(logger|early_stopping|debug)=(\w+)", text)
    assert len(options) >= 4
    assert all((conf_dir() / group / f"{name}.yaml").is_file() for group, name in options)
    keys = re.findall(r"\b(?:run|data|trainer)\.\w+", text)
    assert len(keys) >= 5 and set(keys) <= set(_known_names())


def test_a_word_is_no_key_or_option_of_ours():
    assert not {key for key in _KEYS if key in _known_names()}
    assert not [word for word in _OPTIONS if (conf_dir() / f"{word.replace('=', '/')}.yaml").is_file()]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_no_key("task_name", []), "there is no key task_name; run.name=NAME names the run's folder"),
        (_no_key("extras.x", []), "there is no key extras.x; --cfg job prints the config"),
        (unknown_key("paths"), "there is no key paths; data.root is the dataset's folder"),
        (
            _no_option("model", "unet", ["customconv"]),
            "there is no model=unet; model=customconv is medconv's own U-Net",
        ),
        (
            _no_option("logger", "many_loggers", ["wandb"]),
            "there is no logger=many_loggers; logger=wandb and",
        ),
        (_no_option("debug", "fdr", ["limit"]), "there is no debug=fdr; debug=default is the shortest run"),
    ],
)
def test_an_error_names_what_does_the_same(error, expected):
    assert str(error).startswith(expected)
    assert same_here("data.root") is None


@pytest.mark.parametrize(
    "name", ["path_column", "label_columns", "split_column", "group_column", "target_type"]
)
def test_a_key_of_tables_is_refused_where_the_layout_reads_none(name):
    with pytest.raises(
        ConfigError, match=rf"data\.{name}=patient: .*msd, which reads this dataset, takes no such key"
    ):
        compose.compose(["data=msd", "data.root=/data/set", f"+data.{name}=patient"])
