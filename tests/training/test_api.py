"""medconv/training/api.py: runs from Python are those of `medconv train`."""

import logging
import os
import signal
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from helpers import tiny

import medconv
from medconv.cli.main import run as run_command
from medconv.config import ConfigError
from medconv.training import api, run
from medconv.training.callbacks.thaw import Thaw
from medconv.utils.exit_codes import PREEMPTED
from medconv.utils.logging import logging_of_a_call
from medconv.utils.signals import RunInterrupted


@pytest.fixture
def overrides(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [*tiny.overrides(dataset), "logger=none"]


def test_keywords_are_keys_and_groups(overrides):
    config = medconv.compose(
        overrides,
        conv="basis",
        trainer__max_steps=3,
        trainer__max_time=None,
        data__source_spacing_mm=[1, 2.5, 3],
        tags=["it's", "a, b"],
    )
    assert config.conv["_target_"].endswith(".basis")
    assert config.trainer.max_steps == 3 and config.trainer.max_time is None
    assert config.data.source_spacing_mm == [1, 2.5, 3] and config.tags == ["it's", "a, b"]


def test_the_folder_is_that_of_the_command(overrides, capsys):
    config = medconv.compose(overrides)
    run_command(["train", *overrides, "run.dry_run=true"])
    assert f"# runs/{config.run.name}\n" in capsys.readouterr().out


def test_options_of_ones_own_are_found(overrides, tmp_path):
    (tmp_path / "mine/loss").mkdir(parents=True)
    (tmp_path / "mine/loss/plain.yaml").write_text("_target_: torch.nn.CrossEntropyLoss\n")
    config = medconv.compose(overrides, config_dir="mine", loss="plain")
    assert config.loss["_target_"] == "torch.nn.CrossEntropyLoss"


@pytest.mark.parametrize(
    "arguments, values, error",
    [
        ("seed=1", {}, "overrides must be a list"),
        (["-m", "seed=1,2"], {}, "-m: flags are for the command"),
        (["hydra.mode=MULTIRUN"], {}, "sweeps need the command `medconv train` -m"),
        ([], {"trainer__max_step": 1}, "there is no key trainer.max_step; did you mean trainer.max_steps"),
        (["+hydra.job.env_set={A:b}"], {}, "hydra.job.env_set: set the variables in os.environ"),
        ([], {"init__lr_multipliers": {"^decoder": 0.1}}, "words before a colon .* go into a YAML file"),
        (["data.regions={tum\u00f6r:[1]}"], {}, "words before a colon .* go into a YAML file"),
        ([], {"model": "segresnt"}, "there is no model=segresnt; did you mean segresnet"),
    ],
)
def test_what_cannot_be_composed(arguments, values, error):
    with pytest.raises(ConfigError, match=error):
        medconv.compose(arguments, **values)


def test_samplers_keep_the_keys_that_make_them_options():
    """A class in the place of an option's own loses keys; these options have that of another option."""
    assert medconv.compose(["sampler=uniform"]).sampler["by_weight"] is False
    assert medconv.compose(["sampler=weighted"]).sampler["by_weight"] is True


def test_messages_of_an_earlier_call_stay_out_of_a_later_log(overrides, tmp_path):
    with logging_of_a_call():
        logging.getLogger("medconv").info("of another data set")
    with logging_of_a_call(of_a_later_run=True):
        logging.getLogger("medconv").info("of its config")
    with logging_of_a_call():
        logging.getLogger("medconv").info("of another data set")
    medconv.train(overrides, run__dir=str(tmp_path / "later"))
    content = (tmp_path / "later/train.log").read_text()
    assert "of another data set" not in content and "of its config" in content


def test_a_run_gives_its_result_and_is_not_trained_twice(overrides):
    handlers = logging.getLogger().handlers[:]
    config = medconv.compose(overrides, trainer__max_steps=2)
    result = medconv.train(config)
    assert result.folder == Path("runs", str(config.run.name))
    assert result.checkpoint == result.folder / "checkpoints/best.ckpt" and result.checkpoint.is_file()
    assert result.summary["status"] == "done" and result.summary["steps"] == 2
    assert result.score == result.summary["val/dice"] == result.scores["mean foreground"]
    assert {name: result.scores[name] for name in ("box", "hole")} == result.summary["val/dice_per_class"]
    assert (result.folder / "train.log").read_text()
    assert logging.getLogger().handlers == handlers
    written = result.checkpoint.stat().st_mtime_ns
    assert medconv.train(overrides, trainer__max_steps=2) == result
    assert result.checkpoint.stat().st_mtime_ns == written


def test_the_same_weights_as_by_the_command(overrides):
    result = medconv.train(overrides, trainer__max_steps=2, run__name="python")
    run_command(["train", *overrides, "trainer.max_steps=2", "run.name=command"])
    files = [result.checkpoint, Path("runs/command/checkpoints/best.ckpt")]
    first, second = (torch.load(file, weights_only=True)["state_dict"] for file in files)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_several_devices_need_the_command(overrides, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with pytest.raises(ConfigError, match=r"trainer\.devices=2, .* take the command `medconv train`"):
        medconv.train(overrides, trainer__devices=2)


def test_values_beside_a_composed_config_are_refused(overrides):
    config = medconv.compose(overrides)
    with pytest.raises(ConfigError, match=r"seed: has no effect on a composed config"):
        medconv.train(config, seed=1)
    with pytest.raises(ConfigError, match=r"run\.dry_run=true: only the command"):
        medconv.train(overrides, run__dry_run=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_pythons_own(number, overrides, monkeypatch):
    def interrupted(*_):
        raise RunInterrupted(number)

    monkeypatch.setattr(run, "train", interrupted)
    expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    with pytest.raises(expected) as error:
        medconv.train(overrides)
    if isinstance(error.value, SystemExit):
        assert error.value.code == PREEMPTED
    else:
        assert "the same call resumes the run" in str(error.value)


def test_task_and_data_train_in_lightnings_own_trainer(overrides, dataset):
    setup = medconv.prepare(overrides)
    assert isinstance(setup, api.Prepared) and setup.config.derived.spatial_dims == 3
    assert not Path("runs").exists()
    before = [parameter.clone() for parameter in setup.task.network.parameters()]
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(setup.task, setup.data)
    after = list(setup.task.network.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert 0 <= float(trainer.callback_metrics["val/dice"]) <= 1
    trainer.save_checkpoint("own.ckpt")
    label = medconv.load("own.ckpt", device="cpu")(dataset / "imagesTr/case_0.nii.gz")
    assert label.shape == (16, 18, 12) and label.dtype == np.int16


QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
) | {"accelerator": "cpu"}


def test_a_trainer_without_an_end_trains_on_whole_patches(overrides, caplog):
    """Without progress they would be small for ever."""
    setup = medconv.prepare([*overrides, "data.patch_size=[16,16,16]", "schedule.patch=progressive"])
    sizes = []
    setup.task.network.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[2:]))
    trainer = lightning.Trainer(max_epochs=-1, limit_train_batches=2, limit_val_batches=0, **QUIET)
    trainer.callbacks.append(StopsAfter(2))
    trainer.fit(setup.task, setup.data)
    assert set(sizes) == {torch.Size((16, 16, 16))}
    assert "the learning rate stays, and patches have their full size from the start" in caplog.text


class StopsAfter(lightning.Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.steps


def test_layers_thaw_in_lightnings_own_trainer_by_a_callback(overrides, capsys):
    setup = medconv.prepare(overrides, init__freeze=["encoder"], init__thaw_at=0.9)
    warning = "all layers train from the start, unless your trainer has the callback "
    assert f"{warning}medconv.training.callbacks.thaw.Thaw(['encoder'], 0.9)" in capsys.readouterr().out
    before = setup.task.network.encoder[0][0].weight.detach().clone()
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[Thaw(setup.config.init.freeze, setup.config.init.thaw_at)],
    )
    trainer.fit(setup.task, setup.data)
    assert torch.equal(setup.task.network.encoder[0][0].weight, before)


def test_samples_are_not_divided_twice(overrides):
    setup = medconv.prepare(overrides)
    setup.data.trainer = lightning.Trainer(max_steps=1, strategy="ddp", devices=1, **QUIET)
    with pytest.raises(ValueError, match="needs use_distributed_sampler=False"):
        setup.data.setup("fit")  # as a fit does, which would leave its processes' group behind
