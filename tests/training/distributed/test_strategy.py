"""medconv/training/distributed.py alone and with real processes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ranks, tiny
from helpers.launchers import BATCH, JOB, STEP, TORCHRUN, launch
from helpers.waiting import PATIENCE_S, until
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from medconv.config import DataConfig, PerfConfig, RunConfig, TrainerConfig
from medconv.training import distributed
from medconv.training.distributed import JobRanks, SrunStep, cluster_environment
from medconv.utils.exit_codes import DONE, PREEMPTED

PERF = PerfConfig(timeout_seconds=60.0)
CPU = TrainerConfig(accelerator="cpu", devices=1, num_nodes=1)


def trainer(**settings):
    return replace(CPU, **settings)


@pytest.mark.parametrize(
    "settings", [{"devices": 2}, {"devices": [0, 1]}, {"num_nodes": 2}, {"strategy": "ddp"}]
)
def test_several_processes_use_ddp_with_a_static_graph(settings):
    ddp = distributed.strategy_of(trainer(**settings), PERF)
    assert isinstance(ddp, DDPStrategy)
    assert ddp._ddp_kwargs["gradient_as_bucket_view"] and ddp._ddp_kwargs["static_graph"]
    accumulating = distributed.strategy_of(trainer(**settings, accumulate_grad_batches=2), PERF)
    assert isinstance(accumulating, DDPStrategy) and not accumulating._ddp_kwargs["static_graph"]


def test_one_process_and_other_strategies_are_left_to_lightning():
    assert distributed.strategy_of(trainer(), PERF) is None
    assert distributed.strategy_of(trainer(strategy="ddp_spawn", devices=2), PERF) is None


def test_unused_parameters_are_found_with_the_settings_of_ddp():
    """By Lightning's word, which torch's error of such parameters leads to."""
    ddp = distributed.strategy_of(trainer(strategy="ddp_find_unused_parameters_true", devices=2), PERF)
    assert isinstance(ddp, DDPStrategy) and ddp._ddp_kwargs["find_unused_parameters"]
    assert ddp._timeout.total_seconds() == 60


def test_a_step_of_a_batch_in_parts_takes_as_many_batches_and_their_recomputation():
    def config(**data):
        return RunConfig(data=DataConfig(batch_size=2, **data), trainer=trainer(accumulate_grad_batches=3))

    assert distributed.batches_per_step(config(), 2) == 3
    assert distributed.batches_per_step(config(global_batch_size=8), 2) == 3 * (4 + 3 / 3)


def test_fsdp_shards_over_all_processes():
    fsdp = distributed.strategy_of(trainer(strategy="fsdp", devices=4, num_nodes=2), PERF)
    assert isinstance(fsdp, ModelParallelStrategy)
    assert (fsdp._data_parallel_size, fsdp._tensor_parallel_size) == (8, 1)


@pytest.mark.parametrize(
    ("data", "settings", "batches"),
    [
        ({}, {}, 125),
        ({}, {"devices": 4}, 32),
        ({}, {"devices": [0, 1], "num_nodes": 2}, 32),
        ({"global_batch_size": 16}, {"devices": 2}, 63),
        ({}, {"limit_train_batches": 1.0}, 125),
        ({}, {"limit_train_batches": 0.25}, 31),
        ({}, {"limit_train_batches": 5}, 5),
        ({}, {"limit_train_batches": 500}, 125),
    ],
)
def test_an_epoch_has_its_samples_in_global_batches(data, settings, batches):
    data = DataConfig(samples_per_epoch=1000, batch_size=8, **data)
    config = RunConfig(data=data, trainer=trainer(**settings))
    assert distributed.batches_per_epoch(config) == batches


@pytest.fixture(scope="module")
def of_torchrun(dataset, tmp_path_factory):
    """The folder of two processes under torchrun, with the buffers of each."""
    return trained_by("torchrun", dataset, tmp_path_factory.mktemp("torchrun"))


def trained_by(launcher, dataset, folder):
    settings = ["model.norm=batch", "trainer.max_steps=3", f"run.dir={folder / 'run'}"]
    spy = ["+callbacks.spy._target_=helpers.tiny.Buffers", f"+callbacks.spy.path={folder}"]
    processes = ranks.start(*tiny.overrides(dataset, *settings, *spy), cwd=folder, launcher=launcher)
    ended = ranks.wait(processes, folder)
    assert ended.codes == [DONE, DONE], ended.stderr
    return folder


def test_ranks_validate_with_the_batch_norm_statistics_of_rank_0(of_torchrun):
    buffers = [torch.load(of_torchrun / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert len(buffers[0]) == len(buffers[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


def test_a_job_that_sets_ranks_alone_trains_as_under_torchrun(of_torchrun, dataset, tmp_path):
    """As a PyTorchJob of Kubernetes, whose processes have RANK, but no LOCAL_RANK."""
    weights = []
    for folder in (of_torchrun, trained_by("job", dataset, tmp_path)):
        assert json.loads((folder / "run/summary.json").read_text())["hardware"]["devices"] == 2
        weights.append(torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


STOPPED = [
    "trainer.devices=2",
    "trainer.max_steps=100000",
    "trainer.check_val_every_n_epoch=1000",
    "+callbacks.spy._target_=helpers.tiny.Pids",
]


def test_a_stop_signal_to_one_rank_stops_all(dataset, tmp_path):
    """Also if the ranks synchronise in the middle of accumulated gradients only."""
    settings = ["trainer.accumulate_grad_batches=2", "perf.stop_sync_interval=2"]
    arguments = tiny.overrides(dataset, *STOPPED, *settings, f"+callbacks.spy.path={tmp_path}")
    processes = ranks.start(*arguments, f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    os.kill(_number(tmp_path / "pid0"), signal.SIGTERM)
    ended = ranks.wait(processes, tmp_path)
    assert ended.codes == [PREEMPTED, PREEMPTED], ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "preempted"


def test_a_stopped_process_that_lightning_started_exits_with_0(dataset, tmp_path):
    """Lightning would kill the first process if another ended with an error."""
    arguments = tiny.overrides(
        dataset, *STOPPED, "perf.stop_sync_interval=3", f"+callbacks.spy.path={tmp_path}"
    )
    run_dir = tmp_path / "run"
    processes = ranks.start(*arguments, f"run.dir={run_dir}", cwd=tmp_path, launcher="lightning")
    _number(tmp_path / "pid0")
    os.kill(_number(tmp_path / "pid1"), signal.SIGTERM)
    ended = ranks.wait(processes, tmp_path)
    assert ended.codes == [PREEMPTED, DONE], ended.stderr
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "preempted"


@pytest.mark.slow
def test_a_first_process_that_ends_late_is_not_killed(dataset, tmp_path):
    """Lightning starts the second process, and checks every 5 s whether it has failed."""
    spy = [f"+callbacks.spy.path={tmp_path}", "+callbacks.spy.lingers=6"]
    arguments = tiny.overrides(dataset, *STOPPED, "perf.stop_sync_interval=3", *spy)
    process = subprocess.Popen(
        [sys.executable, *tiny.words("train"), *arguments, f"run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": tiny.PYTHONPATH},
    )
    try:
        pids = [_number(tmp_path / f"pid{rank}") for rank in (0, 1)]
        os.kill(pids[1], signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == PREEMPTED
        until(lambda: not Path(f"/proc/{pids[1]}").is_dir())
    finally:
        process.kill()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "preempted"


def _number(path):
    return int(until(lambda: path.is_file() and path.read_text()))


def test_fsdp_has_no_norms_over_all_processes():
    with pytest.raises(ValueError, match="sync_batchnorm=true has no effect with trainer.strategy=fsdp"):
        distributed.strategy_of(trainer(strategy="fsdp", devices=2, sync_batchnorm=True), PERF)


def test_fsdp_excludes_pointwise_checkpointing():
    with pytest.raises(ValueError, match=r"use perf\.activation_checkpointing=blocks"):
        distributed.strategy_of(
            trainer(strategy="fsdp", devices=2), PerfConfig(activation_checkpointing="pointwise")
        )


def test_a_callback_that_accumulates_gradients_excludes_a_static_graph():
    ddp = distributed.strategy_of(trainer(devices=2), PERF, accumulates=True)
    assert isinstance(ddp, DDPStrategy) and not ddp._ddp_kwargs["static_graph"]


def test_the_timeout_reaches_the_strategy():
    for name in ("ddp", "fsdp"):
        made = distributed.strategy_of(trainer(strategy=name), PerfConfig(timeout_seconds=7.5))
        assert made._timeout.total_seconds() == 7.5


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
