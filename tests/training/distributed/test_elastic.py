"""A run that resumes with another number of processes keeps its global batch."""

import csv
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
from helpers.stopped import stopped
from helpers.waiting import PATIENCE_S, until

from medconv.config import ConfigError, RunConfig
from medconv.training.distributed import batch_size_per_process, has_parts
from medconv.utils.exit_codes import DONE, PREEMPTED

# Instance norms; three batches an epoch, the last one beyond its samples
STEPS = [
    "model.norm=instance",
    "data.samples_per_epoch=10",
    "trainer.max_steps=9",
    "perf.stop_sync_interval=1",
]


def columns(folder):
    """By name of a loss or score: its value after a step."""
    values = {}
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name.startswith(("train/loss", "val/")):
                    values.setdefault(name, {})[int(row["step"])] = float(value)
    return values


def weights(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def test_a_run_of_three_processes_resumes_with_one(dataset, tmp_path):
    """Its losses are those of one process with the whole batch, up to the order of sums."""
    tiny.train(dataset, tmp_path / "one", *STEPS, "data.batch_size=3")
    arguments = tiny.overrides(dataset, *STEPS, "data.batch_size=1", f"run.dir={tmp_path / 'run'}")
    stop = stopped(tmp_path / "stopped", number=int(signal.SIGTERM), step=5)
    ended = ranks.run(*arguments, stop, cwd=tmp_path, number=3)
    assert ended.codes == [PREEMPTED] * 3, ended.stderr
    ended = ranks.run(*arguments, cwd=tmp_path, number=1)
    assert ended.codes == [DONE], ended.stderr
    assert "batch: 3 samples on each device, computed 1 at a time" in ended.stderr[0] + ended.stdout[0]
    one = columns(tmp_path / "one")
    resumed = columns(tmp_path / "run")
    assert list(resumed["train/loss"]) == list(range(9))
    # With several processes it is that of the first one's samples
    for step in (6, 7, 8):
        assert resumed["train/loss"][step] == pytest.approx(one["train/loss"][step], rel=1e-6)
    assert resumed["val/cross_entropy"] == pytest.approx(one["val/cross_entropy"], rel=1e-6)
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "one"), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_one_process_resumes_with_two(dataset, tmp_path):
    """Each takes half of the batch, at once."""
    arguments = tiny.overrides(dataset, *STEPS, "data.batch_size=4")
    tiny.train(dataset, tmp_path / "one", *STEPS, "data.batch_size=4")
    stop = stopped(tmp_path / "stopped", number=int(signal.SIGTERM), step=5)
    ended = ranks.run(*arguments, f"run.dir={tmp_path / 'run'}", stop, cwd=tmp_path, number=1)
    assert ended.codes == [PREEMPTED], ended.stderr
    ended = ranks.run(*arguments, f"run.dir={tmp_path / 'run'}", cwd=tmp_path, number=2)
    assert ended.codes == [DONE] * 2, ended.stderr
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "one"), rtol=0, atol=1e-5)


def config(processes, **settings):
    """A run of parts of 2 samples."""
    sizes = {key: value for key, value in settings.items() if key == "global_batch_size"}
    perf = {key: value for key, value in settings.items() if key not in sizes}
    plain = RunConfig()
    return replace(
        plain,
        data=replace(plain.data, batch_size=2, **sizes),
        perf=replace(plain.perf, **perf),
        trainer=replace(plain.trainer, accelerator="cpu", devices=processes, num_nodes=1),
    )


def test_processes_share_the_global_batch():
    assert batch_size_per_process(config(4)) == 2
    assert batch_size_per_process(config(4, global_batch_size=4)) == 1
    assert batch_size_per_process(config(1, global_batch_size=8)) == 8
    assert not has_parts(config(4, global_batch_size=8))
    assert has_parts(config(2, global_batch_size=8))


# Processes, settings, and what the error says
IMPOSSIBLE = [
    (
        4,
        {"global_batch_size": 2},
        "data.global_batch_size=2 cannot be divided among 4 processes, but among 1, 2;",
    ),
    (3, {"global_batch_size": 8}, "data.global_batch_size=8 cannot be divided among 3 processes"),
    (
        1,
        {"global_batch_size": 4, "cuda_graphs": True},
        "perf.cuda_graphs=true does not compute a batch in parts",
    ),
    (
        1,
        {"global_batch_size": 4, "activation_checkpointing": "pointwise"},
        "perf.activation_checkpointing=pointwise does not compute a batch in parts",
    ),
]


@pytest.mark.parametrize(("processes", "settings", "message"), IMPOSSIBLE)
def test_a_batch_that_cannot_be_divided_is_an_error(processes, settings, message):
    with pytest.raises(ConfigError) as error:
        has_parts(config(processes, **settings))
    assert message in str(error.value)


def torchrun(where, cwd, *arguments):
    """An agent of one or two, with one process."""
    options = [
        "--nnodes=1:2",
        "--max-restarts=3",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=elastic",
        f"--rdzv-endpoint=localhost:{where}",
        "--rdzv-conf=last_call_timeout=5",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(tiny.ROOT / "train.py"), *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": tiny.PYTHONPATH},
    )


def killed(agent):
    """With the process that it started in a session of its own."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    agent.wait()


@pytest.mark.slow
def test_one_of_two_agents_of_torchrun_is_killed_and_the_other_goes_on(dataset, tmp_path):
    settings = ["trainer.max_steps=300", "run.checkpoint_interval=00:00:00:00", "run.dir=run"]
    arguments = tiny.overrides(dataset, *STEPS, "data.batch_size=1", *settings)
    where = ranks.port()
    stays, goes = (torchrun(where, tmp_path, *arguments) for _ in range(2))
    try:
        until(lambda: (tmp_path / "run/checkpoints/last.ckpt").is_file() or stays.poll() is not None)
        killed(goes)
        output, _ = stays.communicate(timeout=PATIENCE_S)
    finally:
        if stays.poll() is None:
            killed(stays)
    assert stays.returncode == DONE, output
    assert "trainer: 2 x cpu" in output
    assert "trainer: 1 x cpu" in output
    assert "2 samples in each step" in output.rpartition("trainer: 2 x cpu")[2]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 300
    assert summary["hardware"]["devices"] == 1
