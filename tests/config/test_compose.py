"""medconv/config/compose.py: a key or an option that does not exist is named before any work."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from medconv.config import ConfigError, compose, validate
from medconv.config.trusted import build_trusted
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


def composed(folder: Path, *arguments: str) -> Any:
    seen: list[Any] = []
    compose.run_with_config(lambda config, _: seen.append(config), [*arguments, f"--config-dir={folder}"])
    return seen[0]


def test_an_experiment_may_set_any_key(tmp_path: Path) -> None:
    """One of each kind: at the top, of each typed section, of a group, and another option of a group."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /model: segresnet}, {override /data: phantom2d}]\n"
        "seed: 7\ntags: [a]\nrun: {name: mine, resume: never}\nplan: {max_stages: 3}\n"
        "task: {overlap: 0.25}\nschedule: {patch: whole}\ndata: {fold: 2}\n"
        "trainer: {max_steps: 5, max_time: null}\nperf: {compile: true}\noptimizer: {lr: 0.5}\n"
    )
    config = composed(tmp_path, "experiment=mine", "data.fold=3")
    assert config.seed == 7 and config.tags == ["a"] and config.run == {**config.run, "name": "mine"}
    assert config.run.resume == "never" and config.plan.max_stages == 3 and config.task.overlap == 0.25
    assert config.schedule.patch == "whole" and config.data.fold == 3 and config.perf.compile is True
    assert config.trainer.max_steps == 5 and config.trainer.max_time is None and config.optimizer.lr == 0.5
    assert "SegResNet" in config.model._target_ and config.data.layout.spatial_dims == 2


@pytest.mark.parametrize("name", ["cpu", "gpu", "ddp", "fsdp"])
def test_options_of_the_trainer_differ_in_what_they_are_named_for(name: str, tmp_path: Path) -> None:
    trainer = composed(tmp_path, f"trainer={name}").trainer
    plain = composed(tmp_path).trainer
    changed = {key: value for key, value in trainer.items() if plain[key] != value}
    assert (
        changed
        == {
            "cpu": {"accelerator": "cpu"},
            "gpu": {"accelerator": "gpu", "devices": 1},
            "ddp": {"strategy": "ddp", "devices": "auto"},
            "fsdp": {"strategy": "fsdp", "devices": "auto"},
        }[name]
    )


def test_a_resolved_config_says_what_only_the_data_tells(tmp_path: Path) -> None:
    values = yaml.safe_load(compose.resolved(composed(tmp_path, "data.root=here")))
    assert values["data"]["layout"]["root"] == "here"
    assert values["model"]["channels"] == "(from the data: channels)"


def config_of(*arguments: str) -> Any:
    found: list[Any] = []
    compose.run_with_config(lambda config, _: found.append(config), arguments)
    return found[0]


def test_an_override_may_be_an_interpolation() -> None:
    """Of values of the config, and of those that only the data tells."""
    composed_config = config_of("run.name=fold${data.fold}", "model.strides=${derived.strides}")
    assert composed_config.run.name == "fold0"
    assert OmegaConf.is_interpolation(composed_config.model, "strides")


@pytest.mark.parametrize("images", ["a/{id}_training.tif", r"a/\{id\}_training.tif", "'a/{id}_training.tif'"])
def test_patterns_stand_on_the_command_line_as_they_are(images: str) -> None:
    arguments = ["data=folder", f"data.images={images}", "data.labels=*/{id}-T1-*"]
    data = validate(config_of(*arguments, r"data.group_pattern=(patient\d+)_")).data
    assert data.layout["images"] == data.images == "a/{id}_training.tif"
    assert (data.labels, data.group_pattern) == ("*/{id}-T1-*", r"(patient\d+)_")
    assert validate(config_of("data=folder", "data.group_pattern=null")).data.group_pattern is None


def test_a_volume_of_a_series_needs_no_quotes() -> None:
    """Hydra takes no # outside of quotes."""
    assert validate(config_of("data=folder", "data.images=a/{id}/dwi#b=50")).data.images == "a/{id}/dwi#b=50"
    structures = "data.labels=a/{id}/rs.dcm#roi=Heart|Herz;lung L"
    assert validate(config_of("data=folder", structures)).data.labels == structures.partition("=")[2]
    channels = "data.images={b0:a/{id}/dwi#1,t2:a/{id}/t2,b50:b/*/{id}/d#b=50.5}"
    expected = {"b0": "a/{id}/dwi#1", "t2": "a/{id}/t2", "b50": "b/*/{id}/d#b=50.5"}
    assert validate(config_of("data=folder", channels)).data.images == expected


@pytest.mark.parametrize("root", ["a/jürgen/日本", "scans (2)/x=1", "a;b&c/d[1]"])
def test_a_path_of_any_characters_needs_no_quotes(root: str) -> None:
    """Hydra reads ASCII letters alone, and gives brackets a meaning."""
    data = validate(config_of("data=folder", f"data.images={root}/{{id}}.nii", f"data.root={root}")).data
    assert (data.images, data.root) == (f"{root}/{{id}}.nii", root)


def test_a_shell_leaves_the_home_folder_in_a_value() -> None:
    assert config_of("data.root=~/scans").data.root == str(Path.home() / "scans")


@pytest.mark.parametrize("override", ["data.root", "data.root=ü,b", "data.patch_size=[1,2", "loss=a(b"])
def test_what_cannot_be_read_is_named_with_the_way_to_write_it(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cannot read {override}: write KEY=VALUE, and")):
        config_of(override)


def test_a_pattern_for_each_channel() -> None:
    channels = "data.images={t1:a/{id}_t1.nii.gz,flair:a/{id}_f*.nii.gz}"
    data = validate(config_of("data=folder", channels)).data
    assert data.images == {"t1": "a/{id}_t1.nii.gz", "flair": "a/{id}_f*.nii.gz"}


NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self, in_channels, out_channels, width=4, norm=None): super().__init__()
"""


def test_a_class_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the keys that it takes and those that the user sets, as an error; installed packages win."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_net.py").write_text(NETWORK)
    (tmp_path / "torch.py").write_text("raise SystemExit")
    model = config_of("model._target_=my_own_net.Net", "+model.width=8", "model.convs_per_stage=3").model
    assert sorted(model) == ["_target_", "convs_per_stage", "in_channels", "norm", "out_channels", "width"]
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)
    assert "strides" in config_of("model._target_=medconv.models.Encoder").model


def test_other_classes_get_no_keys_of_the_options_they_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named on the command line or by an experiment; keys that these set stay, so that wrong ones fail."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "another_own.py").write_text(
        NETWORK + "class Wide(Net):\n    def __init__(self, **more): super().__init__(**more)\n"
        "def swap(conv, share=None, extent_mm=None): return conv\n"
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(
        "# @package _global_\nmodel: {_target_: another_own.Net, width: 8, strided: true}\n"
    )
    config = config_of("experiment=mine", "--config-dir", str(tmp_path))
    assert sorted(config.model) == ["_target_", "in_channels", "norm", "out_channels", "strided", "width"]
    assert "strides" in config_of("model._target_=another_own.Wide").model  # it takes any
    conv = config_of("conv._target_=another_own.swap", "conv.length_mm=3").conv
    assert sorted(conv) == ["_partial_", "_target_", "extent_mm", "length_mm", "share", "where"]
    optimizer = config_of("optimizer=sgd", "optimizer._target_=torch.optim.RMSprop").optimizer
    assert sorted(optimizer) == ["_partial_", "_target_", "lr", "momentum", "weight_decay"]
    assert "loss" not in config_of("~loss")
    monai = config_of("model._target_=monai.networks.nets.Unet", "conv.share=0.5")
    assert monai.conv._target_ == "medconv.convs.smooth" and monai.conv.share == 0.5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "smooth"),
        (["model=segresnet"], "plain"),
        (["experiment=nnunet"], "plain"),
        (["experiment=nnunet", "conv=acs"], "acs"),
        (["conv=none", "model=customconv"], "plain"),
        (["model._target_=medconv.models.Encoder"], "smooth"),
        (["model._target_=monai.networks.nets.Unet"], "plain"),
        (["model._target_=monai.networks.nets.Unet", "conv=smooth"], "smooth"),
    ],
)
def test_which_convolution_is_the_default(arguments: list[str], expected: str) -> None:
    """Our U-Net's is smooth; what has its own first weights, or nnU-Net's recipe, keeps them."""
    assert config_of(*arguments).conv._target_ == f"medconv.convs.{expected}"


def test_a_class_that_a_file_names_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "another_net.py").write_text(NETWORK)
    with pytest.raises(compose.config.ConfigError, match=r"another_net\.Net is refused"):
        build_trusted({"_target_": "another_net.Net", "in_channels": 1, "out_channels": 1}, "model")
    assert str(tmp_path) not in sys.path
    build_trusted(
        {"_target_": "another_net.Net", "in_channels": 1, "out_channels": 1}, "model", ["another_net"]
    )


def test_hydra_starts_where_help_texts_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 formats each help text when its argument is added; one of Hydra's is not a string."""
    add = argparse.ArgumentParser._add_action

    def check_help(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if action.help:
            parser._get_formatter()._expand_help(action)

    def check_and_add(parser: Any, action: Any) -> Any:
        parser._check_help(action)
        return add(parser, action)

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "_add_action", check_and_add)
    with pytest.raises(TypeError):
        compose.get_args_parser()
    assert config_of("seed=7").seed == 7
    assert compose.hydra_flags(["seed=7"], "medconv train").overrides == ["seed=7"]
