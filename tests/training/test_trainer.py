"""medconv/training/trainer.py: what a config gives the trainer of a run, and the order of callbacks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.profilers import SimpleProfiler

from medconv.config import ConfigError
from medconv.performance.step_profiler import StepProfiler
from medconv.training import run
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.callbacks.progress import LearningRate, ProgressBar, ProgressLines
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.callbacks.weight_averaging import AverageWeights
from medconv.training.checkpoint.resumable_loop import FinalValidation, PerStepSeeding
from medconv.training.checkpoint.writer import CheckpointWriter
from medconv.training.data_setup import prepare_data
from medconv.training.distributed import BroadcastBuffers, ResumeStepCheck, StopSync, UnshardForValidation
from medconv.training.run import with_devices
from medconv.training.run_dir import RunDir
from medconv.training.trainer import build_trainer
from medconv.utils.signals import StopRequest


def trainer_of(dataset, folder, *overrides):
    """The trainer of a run that does not begin."""
    checked = with_devices(tiny.checked(dataset, *overrides))
    prepared = prepare_data(checked)
    resolved = run.resolve(checked, prepared, RunDir(folder))
    return build_trainer(resolved, RunDir(folder), StepProfiler(), prepared, StopRequest())


@pytest.mark.parametrize(
    ("bounds", "epochs"),
    [
        ([], 100),
        (["trainer.max_steps=4"], -1),
        (["trainer.max_time=00:01:00:00"], -1),
        (["trainer.max_steps=4", "trainer.max_epochs=7"], 7),
    ],
)
def test_run_has_100_epochs_if_nothing_else_ends_it(dataset, tmp_path, bounds, epochs):
    trainer = trainer_of(dataset, tmp_path / "run", "trainer.max_steps=-1", *bounds)
    assert trainer.max_epochs == epochs and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("bounds", "epochs"), [([], 0), (["trainer.min_epochs=2"], 2)])
def test_a_least_number_of_steps_demands_no_whole_epoch(dataset, tmp_path, bounds, epochs):
    trainer = trainer_of(dataset, tmp_path / "run", "trainer.min_steps=3", *bounds)
    assert (trainer.min_steps, trainer.min_epochs) == (3, epochs)


@pytest.mark.parametrize(("limit", "says"), [(5, "leaves 1 for the last step"), (4, "")])
def test_a_limit_that_cuts_a_step_is_a_warning(dataset, tmp_path, caplog, limit, says):
    sizes = ["data.samples_per_epoch=32", "trainer.accumulate_grad_batches=2"]
    trainer_of(dataset, tmp_path / "run", *sizes, f"trainer.limit_train_batches={limit}")
    assert says in caplog.text
    assert ("accumulate_grad_batches" in caplog.text) == bool(says)


def test_steps_of_fine_tuning_are_never_few(dataset, tmp_path):
    """How many a size needs was measured from random weights."""
    file = tmp_path / "first.ckpt"
    record = {"config": {"derived": {"size": "small"}}}
    torch.save({"medconv": record, "state_dict": {"network.head.weight": torch.ones(2)}}, file)
    for begins_from, expected in ((None, "small"), (file, None)):
        pretrained = "null" if begins_from is None else begins_from
        more = (f"init.pretrained={pretrained}", "plan.size=small", "trainer.max_time=00:00:01:00")
        trainer = trainer_of(dataset, tmp_path / "run", "trainer.max_steps=-1", *more)
        (budget,) = (each for each in trainer.callbacks if isinstance(each, TimeBudget))
        assert getattr(budget._size, "name", None) == expected


def test_objects_of_the_trainer_are_built_from_nodes(dataset, tmp_path):
    trainer = trainer_of(
        dataset,
        tmp_path / "run",
        "trainer.plugins=[{_target_:lightning.pytorch.plugins.TorchSyncBatchNorm}]",
        "trainer.profiler={_target_:lightning.pytorch.profilers.SimpleProfiler,extended:false}",
        "trainer.limit_predict_batches=3",
        "trainer.reload_dataloaders_every_n_epochs=2",
        "trainer.enable_autolog_hparams=false",
    )
    assert isinstance(trainer._accelerator_connector._layer_sync, TorchSyncBatchNorm)
    assert isinstance(trainer.profiler, SimpleProfiler) and not trainer.profiler.extended
    assert trainer.limit_predict_batches == 3 and trainer.reload_dataloaders_every_n_epochs == 2
    assert trainer.enable_autolog_hparams is False


def test_in_a_terminal_the_users_bar_takes_the_place_of_ours(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("medconv.training.trainer.in_terminal", lambda: True)
    ours = trainer_of(dataset, tmp_path / "run", "trainer.enable_progress_bar=true")
    shown = [type(callback) for callback in ours.callbacks if "Progress" in type(callback).__name__]
    assert shown == [ProgressBar, ProgressLines] and ours.progress_bar_callback is None
    theirs = "+callbacks.bar._target_=lightning.pytorch.callbacks.TQDMProgressBar"
    trainer = trainer_of(dataset, tmp_path / "run", "trainer.enable_progress_bar=true", theirs)
    shown = [type(callback) for callback in trainer.callbacks if "Progress" in type(callback).__name__]
    assert shown == [ProgressLines, TQDMProgressBar]


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (CheckpointWriter, AverageWeights),
        (PerStepSeeding, NonfiniteGuard),
        (PerStepSeeding, LearningRate),
        (StepProfiler, LearningRate),
        (NonfiniteGuard, AverageWeights),
        (AverageWeights, BroadcastBuffers),
        (AverageWeights, LearningRate),
        (TimeBudget, EarlyStopping),
        (TimeBudget, FinalValidation),
        (LearningRate, FinalValidation),
        (UnshardForValidation, StopSync),
        (AverageWeights, StopSync),
        (LearningRate, StopSync),
    ],
)
def test_callbacks_are_called_in_an_order(order, earlier, later):
    """LearningRate is one of the user's."""
    assert order.index(earlier) < order.index(later)


@pytest.fixture(scope="module")
def order(dataset, tmp_path_factory):
    """The callbacks' classes of a trainer that has all of them."""
    settings = ["trainer.max_time=00:01:00:00", "perf.profile=true", "+early_stopping.monitor=val/dice"]
    settings += ["+early_stopping._target_=lightning.pytorch.callbacks.EarlyStopping"]
    settings += ["trainer.accelerator=cpu", "trainer.devices=2", "callbacks=default"]
    trainer = trainer_of(dataset, tmp_path_factory.mktemp("order") / "run", *settings)
    return [type(callback) for callback in trainer.callbacks]


def test_a_process_that_trains_alone_has_no_callbacks_for_several(dataset, tmp_path):
    trainer = trainer_of(dataset, tmp_path / "run", "trainer.accelerator=cpu")
    for_several = (BroadcastBuffers, ResumeStepCheck, UnshardForValidation)
    assert not any(isinstance(callback, for_several) for callback in trainer.callbacks)


class Enough(Callback):
    """A user's callback that ends the run after two steps."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


def test_a_run_that_a_users_callback_ends_is_validated(dataset, tmp_path):
    ends = [f"+callbacks.enough._target_={__name__}.Enough", "trainer.check_val_every_n_epoch=1000"]
    summary = tiny.train(dataset, tmp_path / "run", "logger=none", "trainer.max_steps=8", *ends)
    assert summary["steps"] == 2 and len(summary["val/cases"]) == 3


@pytest.mark.parametrize("steps", [1, 2])
def test_a_callback_that_accumulates_gradients_excludes_a_static_graph(dataset, tmp_path, steps):
    node = "{_target_:lightning.pytorch.callbacks.GradientAccumulationScheduler,scheduling:{0:2}}"
    more = [f"+callbacks.more={node}"] if steps > 1 else []
    trainer = trainer_of(dataset, tmp_path / "run", "trainer.strategy=ddp", *more)
    assert trainer.strategy._ddp_kwargs["static_graph"] == (steps == 1)


@pytest.mark.parametrize(
    ("callback", "settings", "message"),
    [
        (
            "GradientAccumulationScheduler,scheduling:{0:2}",
            ["trainer.max_steps=-1", "trainer.max_epochs=2"],
            "GradientAccumulationScheduler changes how many steps an epoch has",
        ),
        ("StochasticWeightAveraging,swa_lrs:0.1", [], "weight_averaging=polynomial averages weights"),
    ],
)
def test_callbacks_that_hide_the_length_of_the_schedule_are_refused(
    callback, settings, message, dataset, tmp_path
):
    node = f"+callbacks.more={{_target_:lightning.pytorch.callbacks.{callback}}}"
    with pytest.raises(ConfigError, match=message):
        trainer_of(dataset, tmp_path / "run", node, *settings)


def test_the_last_step_is_validated_before_the_fewest_epochs_are_done(dataset, tmp_path):
    settings = ["trainer.min_epochs=1", "trainer.max_steps=2", "data.samples_per_epoch=100", "logger=none"]
    summary = tiny.train(dataset, tmp_path / "run", *settings)
    assert summary["steps"] == 2 and len(summary["val/cases"]) == 3
    assert (tmp_path / "run/checkpoints/best.ckpt").is_file()


class EnoughForGood(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step >= 2


def test_a_stop_that_the_fewest_epochs_put_off_is_validated(dataset, tmp_path):
    """As by a time that is up: Lightning grants it after the last batch of the first epoch."""
    ends = [f"+callbacks.enough._target_={__name__}.EnoughForGood", "trainer.val_check_interval=0.4"]
    more = ["trainer.max_steps=8", "trainer.min_epochs=1", "data.samples_per_epoch=10"]
    assert tiny.train(dataset, tmp_path / "run", *more, *ends)["steps"] == 5
    assert len(tiny.logged(tmp_path / "run", "val/dice")) == 3  # after steps 2, 4 and 5


def test_a_batch_can_be_overfitted(dataset, tmp_path):
    """Lightning then makes the loader again, with another order of samples."""
    settings = ["trainer.overfit_batches=1", "trainer.max_steps=3", "logger=none"]
    summary = tiny.train(dataset, tmp_path / "run", *settings)
    assert summary["steps"] == 3 and summary["data_wait_share"] > 0


def test_a_users_checkpoints_lie_beside_ours(dataset, tmp_path):
    """Each callback has a folder of its own: `save_last` would overwrite our last.ckpt."""
    target = "_target_=lightning.pytorch.callbacks.ModelCheckpoint"
    trainer = trainer_of(
        dataset,
        tmp_path / "run",
        f"+callbacks.mine.{target}",
        f"+callbacks.other.{target}",
        "+callbacks.other.dirpath=elsewhere",
        "+callbacks.other.every_n_train_steps=7",  # Lightning keeps the states of different ones only
    )
    folders = [callback.dirpath for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
    assert folders == [str(tmp_path / "run/checkpoints/mine"), str(Path("elsewhere").absolute())]
