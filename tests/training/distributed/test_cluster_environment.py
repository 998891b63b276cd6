"""medconv/training/distributed.py: Lightning's cluster environment under each launcher."""

from helpers.launchers import BATCH, JOB, STEP, TORCHRUN, launch
from lightning.pytorch.plugins.environments import LightningEnvironment

from medconv.training.distributed import JobRanks, SrunStep, cluster_environment


def test_srun_gives_the_variables_of_its_own_step(monkeypatch):
    launch(monkeypatch, **STEP, SLURM_NODELIST="other")
    step = cluster_environment()
    assert isinstance(step, SrunStep) and not step.auto_requeue
    address = (step.main_address, step.main_port, step.world_size(), step.global_rank())
    assert address == ("gpu07-ib", 19711, 8, 0)
    monkeypatch.setenv("MASTER_ADDR", "chosen")
    assert step.main_address == "chosen"


def test_a_batch_script_without_srun_does_not_wait_for_other_tasks(monkeypatch):
    launch(monkeypatch, **BATCH)
    own = cluster_environment()
    assert isinstance(own, LightningEnvironment) and not own.creates_processes_externally


def test_ranks_of_a_job_are_read_without_a_local_rank(monkeypatch):
    launch(monkeypatch, **{**JOB, "RANK": 5})
    alone = cluster_environment()
    assert isinstance(alone, JobRanks) and alone.creates_processes_externally
    assert (alone.global_rank(), alone.node_rank(), alone.local_rank(), alone.world_size()) == (5, 5, 0, 8)
    launch(monkeypatch, **{**JOB, "RANK": 5}, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    of_four = cluster_environment()
    assert isinstance(of_four, JobRanks)
    assert (of_four.global_rank(), of_four.node_rank(), of_four.local_rank()) == (5, 1, 1)


def test_lightning_detects_other_launchers_itself(monkeypatch):
    for variables in ({}, TORCHRUN):
        launch(monkeypatch, **variables)
        assert cluster_environment() is None
