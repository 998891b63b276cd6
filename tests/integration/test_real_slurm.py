"""The scripts for Slurm on a real one: two nodes on this machine, jobs that are preempted, cancelled and lost.

In place of the training, a script in bash does what its signals ask for, so that a job begins at once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import slurm_cluster, tiny
from helpers.slurm_cluster import Cluster
from helpers.waiting import PATIENCE_S, until

WHY_NOT = slurm_cluster.missing()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
# In the place of Python: what each task of an array, or the one job, does in its first start. Later ones end at once.
# `train` saves and ends with 75 when it is told to stop; `import` has no handler yet; `end` ends at once.
PAYLOAD = """#!/usr/bin/env bash
name=${SLURM_ARRAY_TASK_ID:-0}.${SLURM_PROCID:-0}
echo "$name ${SLURM_RESTART_COUNT:-0}" >> starts
kind=$(cat "plan/${SLURM_ARRAY_TASK_ID:-0}")
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && exit 0
case "$kind" in
    end) exit 0 ;;
    train) trap 'exit 75' TERM USR1 ;;
esac
echo "$name" >> ready
while true; do sleep 0.2; done
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        slurm_cluster.running(Path(folder)) as started,
    ):
        yield started


@pytest.fixture
def home(tmp_path: Path, cluster: Cluster) -> Iterator[Path]:
    """The folder that jobs run in; none of them is left."""
    payload = tmp_path / "payload"
    payload.write_text(PAYLOAD)
    payload.chmod(0o755)
    yield tmp_path
    cluster.run("scancel", "--user=root")
    until(lambda: not cluster.run("squeue", "-h"))


def plan(home: Path, *kinds: str) -> None:
    (home / "plan").mkdir()
    for index, kind in enumerate(kinds):
        (home / f"plan/{index}").write_text(kind)


def sweep_script(home: Path, tasks: int, *launcher: str) -> Path:
    """The batch script that a sweep of so many jobs would submit, with the payload in the place of Python."""
    seeds = ",".join(map(str, range(tasks)))
    words = ["-m", f"seed={seeds}", "hydra/launcher=slurm", "run.name=sweep", "run.dry_run=true", *launcher]
    done = tiny.command("train", *words, cwd=home, env={**os.environ, "PYTHONPATH": tiny.PYTHONPATH})
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index("#!/usr/bin/env bash") :]
    assert text.count(sys.executable) == 1
    script = home / "sweep.sh"
    script.write_text(text.replace(sys.executable, str(home / "payload")))
    for folder in folders(home):
        folder.mkdir(parents=True)
    return script


def folders(home: Path) -> list[Path]:
    """Of the tasks' runs, which the script names."""
    text = (home / "sweep.sh").read_text()
    return [Path(name) for name in re.findall(r"^ *\d+\) folder=(\S+)", text, re.MULTILINE)]


def submitted(cluster: Cluster, script: Path, *options: str, home: Path, **variables: str) -> str:
    """Its job's number."""
    words = ("sbatch", "--parsable", "--export=ALL", *options, str(script))
    return cluster.run(*words, cwd=home, **variables).strip()


def lines(file: Path) -> list[str]:
    return sorted(file.read_text().split("\n")[:-1]) if file.exists() else []


def ready(home: Path, *names: str) -> None:
    until(lambda: set(names) <= set(lines(home / "ready")))


def preempt(cluster: Cluster, home: Path, job: str) -> None:
    """A job of more priority takes the node of another one."""
    node = cluster.run("squeue", "-h", "-o", "%N", "-j", job).strip()
    words = ("sbatch", "-p", "high", "-w", node, "-c", "4", "-o", "/dev/null", "--wrap", "sleep 2")
    cluster.run(*words, cwd=home)


def gone(cluster: Cluster, job: str) -> None:
    def is_gone() -> bool:
        # A job that was requeued waits two minutes for its node; it need not.
        queued = cluster.run("squeue", "-h", "-t", "pending", "-r", "-o", "%i").split()
        for name in queued:
            subprocess.run(
                ["scontrol", "update", f"JobId={name}", "StartTime=now"],
                env={**os.environ, "SLURM_CONF": str(cluster.folder / "slurm.conf")},
                capture_output=True,
                check=False,
            )
        return not cluster.run("squeue", "-h", "-o", "%i", "--user=root").strip()

    until(is_gone, pause=0.5)


# A node holds one of these tasks, so that preempting one leaves its neighbour alone.
WHOLE_NODE = "hydra.launcher.cpus_per_task=4"


def codes(home: Path) -> list[str | None]:
    files = [folder / "exit_code" for folder in folders(home)]
    return [file.read_text().strip() if file.exists() else None for file in files]


@pytest.mark.parametrize("kind", ["train", "import"])
def test_the_last_task_of_an_array_is_preempted_and_requeued_alone(
    cluster: Cluster, home: Path, kind: str
) -> None:
    """Its job has the array's number, by which Slurm would requeue all tasks, those that have ended too."""
    plan(home, "end", "train", kind)
    array = submitted(cluster, sweep_script(home, 3, WHOLE_NODE), home=home)
    ready(home, "1.0", "2.0")
    preempt(cluster, home, f"{array}_2")
    until(lambda: "2.0 1" in lines(home / "starts"))
    assert lines(home / "starts") == ["0.0 0", "1.0 0", "2.0 0", "2.0 1"]
    until(lambda: codes(home) == ["0", None, "0"])


def test_two_tasks_are_preempted_at_once(cluster: Cluster, home: Path) -> None:
    plan(home, "train", "train")
    array = submitted(cluster, sweep_script(home, 2, WHOLE_NODE), home=home)
    ready(home, "0.0", "1.0")
    preempt(cluster, home, f"{array}_0")
    preempt(cluster, home, f"{array}_1")
    gone(cluster, array)
    assert lines(home / "starts") == ["0.0 0", "0.0 1", "1.0 0", "1.0 1"]
    assert codes(home) == ["0", "0"]


@pytest.mark.parametrize("kind", ["train", "import"])
def test_a_cancelled_array_is_not_requeued(cluster: Cluster, home: Path, kind: str) -> None:
    plan(home, kind, kind)
    array = submitted(cluster, sweep_script(home, 2, WHOLE_NODE), home=home)
    ready(home, "0.0", "1.0")
    cluster.run("scancel", array)
    gone(cluster, array)
    assert lines(home / "starts") == ["0.0 0", "1.0 0"]
    assert codes(home) == [None, None]


def test_a_node_that_fails_gives_its_job_back(cluster: Cluster, home: Path) -> None:
    plan(home, "train")
    array = submitted(cluster, sweep_script(home, 1, WHOLE_NODE), home=home)
    ready(home, "0.0")
    node = cluster.run("squeue", "-h", "-o", "%N", "-j", f"{array}_0").strip()
    cluster.kill_node(node)
    try:
        until(lambda: "0.0 1" in lines(home / "starts"))
    finally:
        cluster.start_node(node)
    gone(cluster, array)
    assert codes(home) == ["0"]


def train_sbatch(cluster: Cluster, home: Path, *options: str) -> str:
    small = ("--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=4")
    script = tiny.ROOT / "scripts/slurm/train.sbatch"
    return submitted(cluster, script, *small, *options, home=home, PYTHON=str(home / "payload"))


def test_a_run_on_two_nodes_is_told_before_its_time_is_up(cluster: Cluster, home: Path) -> None:
    """SIGUSR1 comes 180 s before, so at once."""
    plan(home, "train")
    job = train_sbatch(cluster, home, "--nodes=2", "--time=00:03:00")
    until(lambda: {"0.0 1", "0.1 1"} <= set(lines(home / "starts")) or gone_without_restart(cluster, home))
    gone(cluster, job)
    assert lines(home / "starts") == ["0.0 0", "0.0 1", "0.1 0", "0.1 1"]


def gone_without_restart(cluster: Cluster, home: Path) -> bool:
    pending = cluster.run("squeue", "-h", "-t", "pending", "-o", "%i").split()
    for job in pending:
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    return False


def test_train_sbatch_as_an_array_requeues_one_task(cluster: Cluster, home: Path) -> None:
    plan(home, "end", "train", "train")
    array = train_sbatch(cluster, home, "--array=0-2")
    ready(home, "1.0", "2.0")
    preempt(cluster, home, f"{array}_2")
    until(lambda: "2.0 1" in lines(home / "starts"))
    assert lines(home / "starts") == ["0.0 0", "1.0 0", "2.0 0", "2.0 1"]


def test_predict_sbatch_requeues_one_task(cluster: Cluster, home: Path) -> None:
    plan(home, "end", "train")
    script = tiny.ROOT / "scripts/slurm/predict.sbatch"
    small = ("--gpus=0", "--cpus-per-task=4", "--array=0-1")
    array = submitted(cluster, script, *small, home=home, PYTHON=str(home / "payload"))
    ready(home, "1.0")
    preempt(cluster, home, f"{array}_1")
    until(lambda: "1.0 1" in lines(home / "starts") or gone_without_restart(cluster, home))
    gone(cluster, array)
    assert lines(home / "starts") == ["0.0 0", "1.0 0", "1.0 1"]


@pytest.mark.slow
def test_a_sweep_trains_on_it(cluster: Cluster, tmp_path: Path) -> None:
    dataset = tiny.write_dataset(tmp_path / "data")
    launcher = ["hydra/launcher=slurm", "hydra.launcher.poll_seconds=1", "run.name=real"]
    words = ["-m", *tiny.overrides(dataset, "logger=none", "callbacks=none"), *launcher, "seed=0,1"]
    environment = {
        **os.environ,
        "PYTHONPATH": tiny.PYTHONPATH,
        "SLURM_CONF": str(cluster.folder / "slurm.conf"),
    }
    done = tiny.command("train", *words, cwd=tmp_path, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(re.findall(r"\bdone\b", (tmp_path / "runs/real/sweep.csv").read_text())) == 2


def test_a_partition_that_does_not_exist_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    words = ["-m", "seed=0,1", "hydra/launcher=slurm", "hydra.launcher.partition=nowhere", "run.name=lost"]
    environment = {
        **os.environ,
        "PYTHONPATH": tiny.PYTHONPATH,
        "SLURM_CONF": str(cluster.folder / "slurm.conf"),
    }
    done = tiny.command("train", *words, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "nowhere" in errors[0] or "invalid partition" in errors[0].lower()
