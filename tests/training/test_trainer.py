"""medconv/training/trainer.py: what a config gives the trainer of a run."""

from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.profilers import SimpleProfiler

from medconv import config
from medconv.performance.step_profiler import StepProfiler
from medconv.training import run
from medconv.training.data_setup import prepare_data
from medconv.training.run_dir import RunDir
from medconv.training.trainer import build_trainer
from medconv.utils.signals import StopRequest


def trainer_of(dataset: Path, folder: Path, *overrides: str) -> Any:
    """The trainer of a run that does not begin."""
    with tiny.initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        composed = tiny.compose("train", tiny.overrides(dataset, *overrides))
    composed = run._with_launched_devices(config.validate(composed))
    prepared = prepare_data(composed)
    values = run._resolve(composed, prepared, RunDir(folder))
    return build_trainer(values, RunDir(folder), StepProfiler(), bool(prepared.val), StopRequest())


@pytest.mark.parametrize(
    ("bounds", "epochs"),
    [
        ([], 100),
        (["trainer.max_steps=4"], -1),
        (["trainer.max_time=00:01:00:00"], -1),
        (["trainer.max_steps=4", "trainer.max_epochs=7"], 7),
    ],
)
def test_run_has_100_epochs_if_nothing_else_ends_it(
    dataset: Path, tmp_path: Path, bounds: list[str], epochs: int
) -> None:
    trainer = trainer_of(dataset, tmp_path / "run", "trainer.max_steps=-1", *bounds)
    assert trainer.max_epochs == epochs and not (tmp_path / "run").exists()


def test_objects_of_the_trainer_are_built_from_nodes(dataset: Path, tmp_path: Path) -> None:
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
