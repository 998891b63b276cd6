"""medconv/config/compose.py: what a command line, experiments and own classes make of the config."""

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.configs import composed as config_of
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from medconv.cli.show import resolved, show
from medconv.config import ConfigError, compose, validate
from medconv.config.compose import as_override, escaped
from medconv.config.schema import list_options
from medconv.config.trusted import build_trusted


def composed(folder, *arguments):
    return config_of(*arguments, f"--config-dir={folder}")


def test_an_experiment_may_set_any_key(tmp_path):
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
def test_options_of_the_trainer_differ_in_what_they_are_named_for(name, tmp_path):
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


@pytest.mark.parametrize("name", list_options("debug"))
def test_a_small_run_ends_early_whatever_an_experiment_says(name):
    """And it is never the resumption of an earlier one."""
    run_config = validate(config_of(f"debug={name}", "experiment=nnunet"))
    assert run_config.trainer.max_time is None and run_config.run.resume == "never"
    assert run_config.trainer.max_steps in (2, 20, 100) or run_config.trainer.max_epochs == 2


def test_a_resolved_config_says_what_only_the_data_tells(tmp_path):
    values = yaml.safe_load(resolved(composed(tmp_path, "data.root=here")))
    assert values["data"]["layout"]["root"] == "here"
    assert values["model"]["channels"] == "(from the data: channels)"


def test_an_override_may_be_an_interpolation():
    """Of values of the config, and of those that only the data tells."""
    composed_config = config_of("run.name=fold${data.fold}", "model.strides=${derived.strides}")
    assert composed_config.run.name == "fold0"
    assert OmegaConf.is_interpolation(composed_config.model, "strides")


@pytest.mark.parametrize(
    "argument",
    [
        "hydra/launcher=slurm",
        "hydra.launcher.partition=gpu",
        "+hydra.launcher.gres=gpu",
        "hydra/sweeper=optuna",
    ],
)
def test_what_is_for_a_sweep_is_refused_without_one(argument):
    with pytest.raises(ConfigError, match=rf"{re.escape(argument)}: is for a sweep, which -m starts"):
        config_of(argument)


def test_hydras_own_settings_may_be_used():
    """They are filled in at once, in lists too."""
    composed_config = config_of(
        "model=segresnet", "run.name=x-${hydra:runtime.choices.model}", "tags=['${hydra:job.config_name}']"
    )
    plain = OmegaConf.to_container(composed_config, resolve=False)
    assert plain["run"]["name"] == "x-segresnet" and plain["tags"] == ["train"]


def test_flags_without_effect_are_refused():
    with pytest.raises(ConfigError, match="--resolve is for --cfg job"):
        compose.hydra_flags(["--resolve"], "medconv train")
    with pytest.raises(ConfigError, match="hydra.callbacks has no effect: callbacks=NAME chooses"):
        config_of("+hydra.callbacks.mine._target_=mine.Callback")


@pytest.mark.parametrize("override", ["data.root", "data.patch_size=[1,2", "loss=a(b"])
def test_what_cannot_be_read_is_named_with_the_way_to_write_it(override):
    with pytest.raises(ConfigError, match=re.escape(f"cannot read {override}: write KEY=VALUE, and")):
        config_of(override)


@pytest.mark.parametrize("values", ["a,b", "ü,b"])
def test_several_values_without_a_sweep_are_refused(values):
    with pytest.raises(ConfigError, match=f"data.root={values}: several values; for a sweep .*'{values}'"):
        config_of(f"data.root={values}")


NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self, in_channels, out_channels, width=4, norm=None): super().__init__()
"""


def test_a_class_in_the_current_folder(tmp_path, monkeypatch):
    """It gets the keys that it takes and those that the user sets, as an error; installed packages win."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_net.py").write_text(NETWORK)
    (tmp_path / "torch.py").write_text("raise SystemExit")
    model = config_of("model._target_=my_own_net.Net", "+model.width=8", "model.convs_per_stage=3").model
    assert sorted(model) == ["_target_", "convs_per_stage", "in_channels", "out_channels", "width"]
    assert sys.path[-1] == str(tmp_path) and sys.path[0] != str(tmp_path)
    assert "strides" in config_of("model._target_=medconv.features.image_level.encoder.Encoder").model


def test_a_class_in_the_current_folder_that_a_yaml_file_names(tmp_path, monkeypatch):
    """In an option of the user's own, and nested in one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    (home / "yaml_own_net.py").write_text(NETWORK)
    (home / "yaml_own_part.py").write_text(NETWORK)
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/own.yaml").write_text(
        "_target_: yaml_own_net.Net\nin_channels: 1\nout_channels: 1\nnorm: {_target_: yaml_own_part.Net}\n"
    )
    composed(tmp_path / "mine", "model=own")
    assert sys.path[-1] == str(home)
    importlib.import_module("yaml_own_net")
    importlib.import_module("yaml_own_part")


def test_a_class_in_or_beside_the_folder_of_options(tmp_path, monkeypatch):
    """A package may hold its options, and a folder of options may hold modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine_of_options/model").mkdir(parents=True)
    (tmp_path / "mine_of_options/net_of_options.py").write_text(NETWORK)
    node = "_target_: {}.Net\nin_channels: 1\nout_channels: 1\n"
    (tmp_path / "mine_of_options/model/in.yaml").write_text(node.format("net_of_options"))
    (tmp_path / "mine_of_options/model/beside.yaml").write_text(node.format("mine_of_options.net_of_options"))
    composed(tmp_path / "mine_of_options", "model=in")
    importlib.import_module("net_of_options")
    composed(tmp_path / "mine_of_options", "model=beside")
    importlib.import_module("mine_of_options.net_of_options")


def test_a_config_that_a_run_would_refuse_is_not_printed(capsys):
    for flags in (["--cfg", "job"], ["--cfg", "job", "--resolve"], ["-c", "job"]):
        arguments = ["+mykey=1", *flags]
        with pytest.raises(ConfigError, match=r"^there is no key mykey; --cfg job prints all keys$"):
            show(compose.hydra_flags(arguments, "medconv train"))
    assert capsys.readouterr().out == ""


def test_a_printed_config_is_what_a_run_gets(capsys):
    arguments = ["--cfg", "job", "seed=7"]
    show(compose.hydra_flags(arguments, "medconv train"))
    assert yaml.safe_load(capsys.readouterr().out) == OmegaConf.to_container(config_of("seed=7"))


def test_a_class_that_a_file_names_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "another_net.py").write_text(NETWORK)
    with pytest.raises(compose.config.ConfigError, match=r"another_net\.Net is refused"):
        build_trusted({"_target_": "another_net.Net", "in_channels": 1, "out_channels": 1}, "model")
    assert str(tmp_path) not in sys.path
    build_trusted(
        {"_target_": "another_net.Net", "in_channels": 1, "out_channels": 1}, "model", ["another_net"]
    )


def test_hydra_starts_where_help_texts_are_checked(monkeypatch):
    """Python 3.14 formats each help text when its argument is added; one of Hydra's is not a string."""
    add = argparse.ArgumentParser._add_action

    def check_help(parser, action):
        if action.help:
            parser._get_formatter()._expand_help(action)

    def check_and_add(parser, action):
        parser._check_help(action)
        return add(parser, action)

    monkeypatch.setattr(argparse.ArgumentParser, "_check_help", check_help, raising=False)
    monkeypatch.setattr(argparse.ArgumentParser, "_add_action", check_and_add)
    with pytest.raises(TypeError):
        compose.get_args_parser()
    assert config_of("seed=7").seed == 7
    assert compose.hydra_flags(["seed=7"], "medconv train").overrides == ["seed=7"]


@pytest.mark.parametrize("before", [None, "0"])
def test_hydras_setting_for_errors_is_put_back(before, monkeypatch):
    """A program that composes a config has settings of its own."""
    if before is None:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    else:
        monkeypatch.setenv("HYDRA_FULL_ERROR", before)
    config_of("data=phantom")
    assert os.environ.get("HYDRA_FULL_ERROR") == before


@pytest.mark.parametrize("images", ["a/{id}_training.tif", r"a/\{id\}_training.tif", "'a/{id}_training.tif'"])
def test_patterns_stand_on_the_command_line_as_they_are(images):
    arguments = ["data=folder", f"data.images={images}", "data.labels=*/{id}-T1-*"]
    data = validate(config_of(*arguments, r"data.group_pattern=(patient\d+)_")).data
    assert data.layout["images"] == data.images == "a/{id}_training.tif"
    assert (data.labels, data.group_pattern) == ("*/{id}-T1-*", r"(patient\d+)_")
    assert validate(config_of("data=folder", "data.group_pattern=null")).data.group_pattern is None


def test_a_volume_of_a_series_needs_no_quotes():
    """Hydra takes no # outside of quotes."""
    assert validate(config_of("data=folder", "data.images=a/{id}/dwi#b=50")).data.images == "a/{id}/dwi#b=50"
    structures = "data.labels=a/{id}/rs.dcm#roi=Heart|Herz;lung L"
    assert validate(config_of("data=folder", structures)).data.labels == structures.partition("=")[2]
    channels = "data.images={b0:a/{id}/dwi#1,t2:a/{id}/t2,b50:b/*/{id}/d#b=50.5}"
    expected = {"b0": "a/{id}/dwi#1", "t2": "a/{id}/t2", "b50": "b/*/{id}/d#b=50.5"}
    assert validate(config_of("data=folder", channels)).data.images == expected


@pytest.mark.parametrize("root", ["a/jürgen/日本", "scans (2)/x=1", "a;b&c/d[1]"])
def test_a_path_of_any_characters_needs_no_quotes(root):
    """Hydra reads ASCII letters alone, and gives brackets a meaning."""
    data = validate(config_of("data=folder", f"data.images={root}/{{id}}.nii", f"data.root={root}")).data
    assert (data.images, data.root) == (f"{root}/{{id}}.nii", root)


@pytest.mark.parametrize("labels", ["{id}/m/{class}.nii.gz", "{id}_{class}.png#roi=liver;Nebenniere ü"])
def test_a_pattern_of_masks_needs_no_quotes(labels):
    assert validate(config_of("data=folder", f"data.labels={labels}")).data.labels == labels


def test_lists_and_choices_of_any_letters_need_no_quotes():
    config = validate(config_of("data=csv", "data.label_columns=[ödem,nodule,007]", "tags=[früh,b c]"))
    assert config.data.label_columns == ["ödem", "nodule", "007"]
    assert config.tags == ["früh", "b c"]
    assert escaped("run.name=früh,spät,a") == "run.name='früh','spät',a"
    assert escaped("tags=[a, ü,1.5]") == "tags=[a,'ü','1.5']"
    assert escaped("model.sizes=[ü, 1.5]") == "model.sizes=['ü', 1.5]"


def test_a_home_folder_may_have_any_letters(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert escaped("data.root=~/Größe") == "data.root='/home/me/Größe'"


@pytest.mark.parametrize("text", ["1e5", "007", "1_000", ".5", "true", "inf"])
def test_a_text_that_looks_like_a_number_stays_as_it_was_typed(text):
    config = validate(
        config_of("data=csv", f"run.name={text}", f"data.class_names=[a,{text}]", f"tags=[{text},b]")
    )
    assert config.run.name == text
    assert config.data.class_names == ["a", text]
    assert config.tags == [text, "b"]


def test_null_is_no_text():
    assert validate(config_of("run.name=null")).run.name is None


def test_a_text_that_a_file_gives_as_a_number_is_refused(tmp_path):
    """YAML has lost how it was spelled."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, override data: folder, _self_]\nrun: {name: 1.0e5}\ndata: {class_names: [a, true]}\n"
    )
    with pytest.raises(ConfigError) as raised:
        validate(config_of("--config-name=mine", f"--config-dir={tmp_path}"))
    assert "run.name must be a word or null, got 100000.0; write it in quotes" in str(raised.value)
    assert "data.class_names must be a list of words or null, got true; write it in" in str(raised.value)


@pytest.mark.parametrize("group", ["experiment", "debug", "logger"])
def test_null_is_a_group_without_an_option(group):
    assert validate(config_of(f"{group}=null")) == validate(config_of(f"~{group}"))


def test_null_among_the_options_of_a_sweep():
    without, quick = compose.compose(["-m", "debug=null,limit"])
    assert validate(without.values) == validate(config_of())
    assert validate(quick.values) == validate(config_of("debug=limit"))


def test_a_number_for_an_option_is_named():
    with pytest.raises(ConfigError, match="model=5"):
        config_of("model=5")


def test_null_for_a_group_that_every_run_needs_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^loss: every run needs one, without ~; choose one of auto, "):
        validate(config_of("loss=null"))


def test_a_group_that_is_removed_is_named():
    with pytest.raises(ConfigError, match=r"^loss: every run needs one, without ~; choose one of auto, "):
        validate(config_of("~loss"))


def test_a_shell_leaves_the_home_folder_in_a_value():
    assert config_of("data.root=~/scans").data.root == str(Path.home() / "scans")


def read(override):
    """Key and value, as Hydra reads them."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed.key_or_group, parsed.value()


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -3, 1e-05, 0.25, float("inf")),
        *("segresnet", "mine.net.Net", "null", "True", "nan", "12", "1e3", "00:00:01:30", ""),
        *("a path, with (odd) = characters", "it's", 'a "quote"', "ends\\", "Größe", "{id}_t1", "a#b"),
        *([1, 2.5], [], ["a b", None, [True]], {"a": 1, "b c": ["x,y"], "siteA_*": 2.0}, {}),
    ],
)
def test_a_value_stays_as_it_is(value):
    assert read(as_override("data__key", value)) == ("data.key", value)


def test_paths_tuples_and_numbers_of_numpy_become_plain_values():
    assert read(as_override("a", Path("/data/my images"))) == ("a", "/data/my images")
    assert read(as_override("a", (1, 2))) == ("a", [1, 2])
    assert read(as_override("a", np.float32(0.5))) == ("a", 0.5)
    assert read(as_override("a", np.int64(3))) == ("a", 3)
    assert read(as_override("a", "~/data")) == ("a", str(Path("~/data").expanduser()))


def test_two_underscores_are_a_dot():
    assert as_override("model___target_", "mine.Net") == "model._target_=mine.Net"
    assert as_override("trainer__max_steps", 10) == "trainer.max_steps=10"


def test_another_type_names_its_key():
    with pytest.raises(ConfigError, match=r"^data\.root: expected None, bool, .* got object"):
        as_override("data__root", object())


def test_other_classes_get_no_keys_of_the_options_they_replace(tmp_path, monkeypatch):
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
    assert sorted(config.model) == ["_target_", "in_channels", "out_channels", "strided", "width"]
    assert "strides" in config_of("model._target_=another_own.Wide").model  # it takes any
    conv = config_of("conv._target_=another_own.swap", "conv.length_mm=3").conv
    assert sorted(conv) == ["_partial_", "_target_", "length_mm", "share", "where"]
    optimizer = config_of("optimizer=sgd", "optimizer._target_=torch.optim.RMSprop").optimizer
    assert sorted(optimizer) == ["_partial_", "_target_"]
    assert "loss" not in config_of("~loss")
    monai = config_of("model._target_=monai.networks.nets.Unet", "conv.share=0.5")
    assert monai.conv._target_ == "medconv.convs.smooth" and monai.conv.share == 0.5


@pytest.mark.parametrize(
    ("arguments", "group", "expected"),
    [
        # kernel_size has a default, and another form than the plan's one kernel per stage
        (
            ["model._target_=monai.networks.nets.AttentionUnet"],
            "model",
            ["channels", "in_channels", "out_channels", "spatial_dims", "strides"],
        ),
        # with defaults in MONAI; the data has other numbers
        (
            ["model._target_=monai.networks.nets.SegResNet"],
            "model",
            ["in_channels", "out_channels", "spatial_dims"],
        ),
        (["optimizer._target_=torch.optim.Muon"], "optimizer", []),  # lr: null is for our Muon
        (["optimizer._target_=torch.optim.Muon", "optimizer.lr=0.1"], "optimizer", ["lr"]),
        (["optimizer=adamw", "optimizer._target_=torch.optim.Adam"], "optimizer", ["lr", "weight_decay"]),
        (["augmentation._target_=monai.transforms.Compose"], "augmentation", []),
        (["scheduler._target_=medconv.training.optim.lr_schedulers.poly"], "scheduler", ["warmup_steps"]),
        (
            ["loss=tversky", "loss._target_=monai.losses.DiceLoss"],
            "loss",
            ["include_background", "sigmoid", "softmax", "to_onehot_y"],
        ),
        (
            ["early_stopping=patience", "early_stopping._target_=lightning.pytorch.callbacks.EarlyStopping"],
            "early_stopping",
            ["min_delta", "mode", "monitor", "patience"],
        ),
    ],
)
def test_a_class_keeps_what_it_needs_and_what_describes_the_data(arguments, group, expected):
    """For everything else it has defaults of its own; with arguments like those of ours it keeps all."""
    node = config_of(*arguments)[group]
    assert sorted(key for key in node if not key.startswith("_")) == expected


def test_what_a_class_needs_is_kept_unless_it_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rule.py").write_text("def rule(params, lr, weight_decay): ...\n")
    node = config_of("optimizer._target_=own_rule.rule").optimizer
    assert "lr" not in node and node.weight_decay == 0.01


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "smooth"),
        (["model=segresnet"], "plain"),
        (["experiment=nnunet"], "plain"),
        (["experiment=nnunet", "conv=acs"], "acs"),
        (["conv=none", "model=customconv"], "plain"),
        (["model._target_=medconv.features.image_level.encoder.Encoder"], "smooth"),
        (["model._target_=monai.networks.nets.Unet"], "plain"),
        (["model._target_=monai.networks.nets.Unet", "conv=smooth"], "smooth"),
    ],
)
def test_which_convolution_is_the_default(arguments, expected):
    """Our U-Net's is smooth; what has its own first weights, or nnU-Net's recipe, keeps them."""
    assert config_of(*arguments).conv._target_ == f"medconv.convs.{expected}"


def test_a_subclass_of_our_network_keeps_its_convolution(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub_unet.py").write_text(
        "from medconv.models import UNet\nclass Net(UNet): ...\n" + NETWORK.replace("Net", "Other")
    )
    assert config_of("model._target_=sub_unet.Net").conv._target_ == "medconv.convs.smooth"
    assert config_of("model._target_=sub_unet.Other").conv._target_ == "medconv.convs.plain"
    assert (
        config_of("model._target_=medconv.features.monai_networks.networks.DenseNet").conv._target_
        == "medconv.convs.plain"
    )


def test_a_sweep_may_have_its_values_among_hydras_keys():
    jobs = compose.compose(["-m", "+hydra.sweeper.params.seed='0,1'"])
    assert [job.values["seed"] for job in jobs] == [0, 1]


def test_null_among_several_values_is_no_choice():
    with pytest.raises(
        ConfigError, match=r"cannot read seed=choice\(null,1\): .* null among several values as"
    ):
        compose.compose(["-m", "seed=choice(null,1)"])
