"""The scripts for Slurm on a real one: two nodes on this machine, jobs that are preempted, cancelled and lost.

In place of the training, a script in bash does what its signals ask for, so that a job begins at once.
"""

import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import slurm_cluster, tiny
from helpers.waiting import PATIENCE_S, until

from medconv.features.sweeps import array_script
from medconv.features.sweeps.batch_system import SLURM
from medconv.features.sweeps.job import Job

WHY_NOT = slurm_cluster.missing()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
# In the place of Python: what each task of an array, or the one job, does in its first start. Later ones end at once.
# `train` saves and ends with 75 when it is told to stop; `import` has no handler yet; `deaf` never stops; `end` ends
# at once.
PAYLOAD = """#!/usr/bin/env bash
name=${SLURM_ARRAY_TASK_ID:-0}.${SLURM_PROCID:-0}
echo "$name ${SLURM_RESTART_COUNT:-0}" >> starts
kind=$(cat "plan/${SLURM_ARRAY_TASK_ID:-0}")
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && exit 0
case "$kind" in
    end) exit 0 ;;
    train) trap 'exit 75' TERM USR1 ;;
    deaf) trap '' TERM USR1 ;;
esac
echo "$name" >> ready
while true; do sleep 0.2; done
"""


@pytest.fixture(scope="module")
def cluster():
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        slurm_cluster.running(Path(folder)) as started,
    ):
        yield started


@pytest.fixture
def home(tmp_path, cluster, monkeypatch):
    """The folder that jobs run in; none of them is left."""
    monkeypatch.chdir(tmp_path)
    payload = tmp_path / "payload"
    payload.write_text(PAYLOAD)
    payload.chmod(0o755)
    yield tmp_path
    cluster.run("scancel", "--user=root")
    gone(cluster)


def plan(home, *kinds):
    (home / "plan").mkdir()
    for index, kind in enumerate(kinds):
        (home / f"plan/{index}").write_text(kind)


def sweep(cluster, home, *kinds, **launcher):
    """Submit the batch script of a sweep with the payload in the place of Python. Returns: the array's number.

    A node holds one of its tasks, so that preempting one leaves its neighbour alone.
    """
    plan(home, *kinds)
    jobs = [Job(overrides=(f"seed={index}",), flags=(), home=home) for index in range(len(kinds))]
    text = array_script.script(jobs, SLURM, {"cpus_per_task": 4, **launcher}, ["seed"])
    assert text.count(sys.executable) == 1
    script = home / "sweep.sh"
    script.write_text(text.replace(sys.executable, str(home / "payload")))
    for job in jobs:
        job.folder.path.mkdir()
    return submitted(cluster, script, home=home)


def codes(home):
    """By task: the exit code in its folder; empty: there is none."""
    folders = re.findall(r"^ *\d+\) folder=(\S+)", (home / "sweep.sh").read_text(), re.MULTILINE)
    files = [Path(folder, "exit_code") for folder in folders]
    return [file.read_text().strip() if file.exists() else "" for file in files]


def submitted(cluster, script, *options, home, **variables):
    """Its job's number."""
    words = ("sbatch", "--parsable", f"--chdir={home}", *options, str(script))
    return cluster.run(*words, cwd=home, **variables).strip()


def lines(file):
    return sorted(file.read_text().split("\n")[:-1]) if file.exists() else []


def ready(home, *names):
    until(lambda: set(names) <= set(lines(home / "ready")))


def node_of(cluster, job):
    return cluster.run("squeue", "-h", "-o", "%N", "-j", job).strip()


def preempt(cluster, job):
    """A job of more priority takes the node of another one."""
    node = node_of(cluster, job)
    words = ("sbatch", "-p", "high", "-w", node, "-c", "4", "-o", "/dev/null", "--wrap", "sleep 1")
    cluster.run(*words)


def gone(cluster):
    until(lambda: not cluster.run("squeue", "-h"), pause=0.3)


@pytest.mark.parametrize("kind", ["train", "import"])
def test_the_last_task_of_an_array_is_preempted_and_requeued_alone(cluster, home, kind):
    """Its job has the array's number, by which Slurm would requeue all tasks, those that have ended too."""
    array = sweep(cluster, home, "end", "train", kind)
    ready(home, "1.0", "2.0")
    preempt(cluster, f"{array}_2")
    until(lambda: codes(home) == ["0", "", "0"])
    assert lines(home / "starts") == ["0.0 0", "1.0 0", "2.0 0", "2.0 1"]


def test_two_tasks_are_preempted_at_once(cluster, home):
    array = sweep(cluster, home, "train", "train")
    ready(home, "0.0", "1.0")
    preempt(cluster, f"{array}_0")
    preempt(cluster, f"{array}_1")
    gone(cluster)
    assert lines(home / "starts") == ["0.0 0", "0.0 1", "1.0 0", "1.0 1"]
    assert codes(home) == ["0", "0"]


@pytest.mark.parametrize("kind", ["train", "import"])
def test_a_cancelled_array_is_not_requeued(cluster, home, kind):
    array = sweep(cluster, home, kind, kind)
    ready(home, "0.0", "1.0")
    cluster.run("scancel", array)
    gone(cluster)
    assert lines(home / "starts") == ["0.0 0", "1.0 0"]
    assert codes(home) == ["", ""]


def test_a_job_is_told_before_its_time_is_up_and_ended_if_it_does_not_stop(cluster, home):
    """SIGUSR1 comes 180 s before the limit, so at once; the other job's limit is over already."""
    array = sweep(cluster, home, "train", "deaf", time="00:03:00")
    ready(home, "1.0")
    cluster.run("scontrol", "update", f"JobId={array}_1", "TimeLimit=0")
    gone(cluster)
    assert lines(home / "starts") == ["0.0 0", "0.0 1", "1.0 0"]
    assert codes(home) == ["0", ""]


def test_a_node_that_fails_gives_its_job_back(cluster, home):
    array = sweep(cluster, home, "train")
    ready(home, "0.0")
    node = node_of(cluster, f"{array}_0")
    cluster.kill_node(node)
    try:
        until(lambda: "0.0 1" in lines(home / "starts"))
    finally:
        cluster.start_node(node)
    gone(cluster)
    assert codes(home) == ["0"]


def train_sbatch(cluster, home, *options):
    small = ("--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=4")
    script = tiny.ROOT / "scripts/slurm/train.sbatch"
    return submitted(cluster, script, *small, *options, home=home, PYTHON=str(home / "payload"))


def test_a_run_on_two_nodes_is_told_before_its_time_is_up(cluster, home):
    plan(home, "train")
    train_sbatch(cluster, home, "--nodes=2", "--time=00:03:00")
    gone(cluster)
    assert lines(home / "starts") == ["0.0 0", "0.0 1", "0.1 0", "0.1 1"]


def test_train_sbatch_as_an_array_requeues_one_task(cluster, home):
    plan(home, "end", "train", "train")
    array = train_sbatch(cluster, home, "--array=0-2")
    ready(home, "1.0", "2.0")
    preempt(cluster, f"{array}_2")
    until(lambda: "2.0 1" in lines(home / "starts"))
    assert lines(home / "starts") == ["0.0 0", "1.0 0", "2.0 0", "2.0 1"]


def test_predict_sbatch_requeues_one_task(cluster, home):
    plan(home, "end", "train")
    script = tiny.ROOT / "scripts/slurm/predict.sbatch"
    small = ("--gpus=0", "--cpus-per-task=4", "--array=0-1")
    array = submitted(cluster, script, *small, home=home, PYTHON=str(home / "payload"))
    ready(home, "1.0")
    preempt(cluster, f"{array}_1")
    gone(cluster)
    assert lines(home / "starts") == ["0.0 0", "1.0 0", "1.0 1"]


def sweep_command(cluster, folder, *words):
    variables = {"PYTHONPATH": tiny.PYTHONPATH, "SLURM_CONF": str(cluster.folder / "slurm.conf")}
    launcher = ("hydra/launcher=slurm", "hydra.launcher.poll_seconds=1", "run.name=real")
    return subprocess.Popen(
        [sys.executable, *tiny.words("train"), "-m", *launcher, *words],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def table(folder):
    with (folder / "runs/real/sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_search_by_optuna_trains_on_it(cluster, tmp_path):
    """Two trials at once."""
    dataset = tiny.write_dataset(tmp_path / "data")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2")
    space = "optimizer.lr=interval(1e-3,1e-2)"
    words = tiny.overrides(dataset, "logger=none", space)
    search_process = sweep_command(cluster, tmp_path, *search, *words)
    output, errors = search_process.communicate(timeout=PATIENCE_S)
    assert search_process.returncode == 0, errors + output
    assert [row["status"] for row in table(tmp_path)] == ["done", "done"]


def test_a_job_that_is_cancelled_leaves_the_result_of_another(cluster, tmp_path):
    dataset = tiny.write_dataset(tmp_path / "data")
    words = tiny.overrides(dataset, "logger=none", "seed=0,1")
    sweep_process = sweep_command(cluster, tmp_path, *words, "hydra.launcher.at_once=1")
    waiting = until(lambda: cluster.run("squeue", "-h", "-r", "-t", "pending", "-o", "%i").split()[-1:])
    cluster.run("scancel", *waiting)
    output, errors = sweep_process.communicate(timeout=PATIENCE_S)
    assert sweep_process.returncode == 1, errors + output
    assert [row["status"] for row in table(tmp_path)] == ["done", "failed"]
    assert "ended by the batch system" in table(tmp_path)[1]["reason"]


# More than the partition allows, or has
NEVER = {
    "hydra.launcher.time='12:00:00'": "PartitionTimeLimit",
    "hydra.launcher.cpus_per_task=64": "PartitionConfig",
}


@pytest.mark.parametrize("override", NEVER)
def test_an_array_that_can_never_start_says_so(cluster, tmp_path, override):
    sweep_process = sweep_command(cluster, tmp_path, "seed=0,1", override)
    assert sweep_process.stdout is not None
    # other reasons may come first, while the nodes of the cluster report
    told = f"waits, perhaps for ever: {NEVER[override]}"
    assert any(told in line for line in sweep_process.stdout)
    cluster.run("scancel", "--user=root")
    sweep_process.communicate(timeout=PATIENCE_S)
    assert [row["status"] for row in table(tmp_path)] == ["failed", "failed"]


# Overrides, and what the one line says
REFUSED = [
    (["hydra.launcher.partition=nowhere"], "invalid partition"),
    (["seed=range(6)"], "Invalid job array specification"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED)
def test_an_array_that_slurm_refuses_is_one_line(cluster, tmp_path, overrides, reason):
    refused = sweep_command(cluster, tmp_path, "seed=0,1", *overrides)
    _, errors = refused.communicate(timeout=PATIENCE_S)
    assert refused.returncode == 1
    lines_of_errors = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines_of_errors) == 1
    assert reason in lines_of_errors[0]
