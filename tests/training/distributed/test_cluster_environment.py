"""medconv/training/distributed.py: Lightning's cluster environment under each launcher."""

import pytest
from helpers.launchers import BATCH, STEP, TORCHRUN, launch
from lightning.pytorch.plugins.environments import LightningEnvironment

from medconv.training.distributed import SrunStep, cluster_environment


def test_srun_gives_the_variables_of_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **STEP, SLURM_NODELIST="other")
    step = cluster_environment()
    assert isinstance(step, SrunStep) and not step.auto_requeue
    address = (step.main_address, step.main_port, step.world_size(), step.global_rank())
    assert address == ("gpu07-ib", 19711, 8, 0)
    monkeypatch.setenv("MASTER_ADDR", "chosen")
    assert step.main_address == "chosen"


def test_a_batch_script_without_srun_does_not_wait_for_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, **BATCH)
    own = cluster_environment()
    assert isinstance(own, LightningEnvironment) and not own.creates_processes_externally


def test_lightning_detects_other_launchers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ({}, TORCHRUN):
        launch(monkeypatch, **variables)
        assert cluster_environment() is None
