"""Two machines, as processes over loopback: torchrun, and scripts/slurm as Slurm runs it; one of the two
is lost.
"""

import csv
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from helpers import ranks, tiny
from helpers.slurm_tools import killed_by
from helpers.stopped import stopped
from helpers.waiting import PATIENCE_S

from medconv.training.data_setup import prepare_data
from medconv.utils.exit_codes import DONE, PREEMPTED

SBATCH = tiny.ROOT / "scripts/slurm/train.sbatch"
SAME = ["model.norm=instance", "optimizer=sgd"]
LONG = [*SAME, "data.samples_per_epoch=40", "trainer.max_steps=60", "run.dir=run"]
LOST = "error: another process of this run ended or does not answer ("
# What srun does, as far as a task sees it: the variables of a step, and the highest exit code as its own.
SRUN = """#!{python}
import os, subprocess, sys
from pathlib import Path
nodes, each = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
step = dict(NTASKS=nodes * each, STEP_ID=0, STEP_NUM_TASKS=nodes * each, STEP_NUM_NODES=nodes,
            STEP_TASKS_PER_NODE=f"{{each}}(x{{nodes}})", STEP_NODELIST=",".join(["127.0.0.1"] * nodes))
command = sys.argv[next(i for i, a in enumerate(sys.argv) if i and not a.startswith("--")):]
tasks = []
for rank in range(nodes * each):
    own = dict(step, PROCID=rank, NODEID=rank // each, LOCALID=rank % each)
    env = dict(os.environ, **{{f"SLURM_{{k}}": str(v) for k, v in own.items()}})
    tasks.append(subprocess.Popen(command, env=env, stdout=open(f"out{{rank}}", "w"), stderr=open(f"err{{rank}}", "w")))
    Path(f"task{{rank}}").write_text(str(tasks[-1].pid))
sys.exit(max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks]))
"""


def awaited(condition, process, seconds=PATIENCE_S):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, process.returncode
        time.sleep(0.05)


@contextmanager
def two_machines(tmp_path, *arguments):
    """Each with a torchrun, in a working copy of its own; inside, they run."""
    where = str(ranks.port())
    nodes = [torchrun(node, where, tmp_path / f"node{node}", *arguments) for node in (0, 1)]
    try:
        yield nodes
    finally:
        for node in nodes:
            power_off(node)


def power_off(node):
    """torchrun, and the process it started in a session of its own."""
    for pid in (
        [*Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split(), node.pid]
        if node.poll() is None
        else []
    ):
        os.kill(int(pid), signal.SIGKILL)


def torchrun(node, where, cwd, *arguments):
    cwd.mkdir(exist_ok=True)
    options = [
        "--nnodes=2",
        f"--node-rank={node}",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={where}",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(tiny.ROOT / "train.py"), *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@contextmanager
def slurm(tmp_path, *arguments, python=sys.executable, limit="50", **settings):
    """The sbatch script as Slurm's daemon runs it on the first of two machines; inside, it runs."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(SRUN.format(python=sys.executable))
    (tools / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {tmp_path / 'requeued'}\n")
    (tools / "squeue").write_text("#!/bin/sh\necho ${STATE:-RUNNING}\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    job = {"JOB_ID": "4711", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "1", **settings}
    variables = {f"SLURM_{key}": value for key, value in job.items()}
    path = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": python,
        "MAX_RESTARTS": limit,
        "PYTHONPATH": str(tiny.ROOT),
    }
    process = subprocess.Popen(
        ["bash", str(SBATCH), *arguments],
        cwd=tmp_path,
        start_new_session=True,
        env={
            **os.environ,
            **path,
            "MASTER_PORT": str(ranks.port()),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            **variables,
        },
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_all_processes_that_share_a_cache_find_all_cases(tmp_path):
    """As those of a run do, before they have met; they share the work."""
    folder, fork = tiny.write_dataset(tmp_path / "data"), multiprocessing.get_context("fork")
    config = tiny.checked(folder)
    start = fork.Barrier(4)

    def work(number):
        logging.getLogger("medconv").setLevel(logging.INFO)
        logging.getLogger("medconv").addHandler(logging.FileHandler(tmp_path / f"log{number}"))
        start.wait()
        store = prepare_data(config).store
        assert all(store.read(f"case_{i}").image.any() for i in range(7))

    processes = [fork.Process(target=work, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * 4
    logs = "".join((tmp_path / f"log{number}").read_text() for number in range(4))
    assert "preparing 7 of 7 cases" in logs
    assert not list((tmp_path / "prepared").rglob(".*.*.*"))


def test_the_sbatch_script_is_bash():
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)


def test_a_process_that_is_lost_ends_the_other_and_the_same_command_resumes(dataset, tmp_path):
    arguments = tiny.overrides(dataset, *LONG)
    last = tmp_path / "run/checkpoints/last.ckpt"
    killed = stopped(tmp_path / "killed", step=35, rank=1)
    ended = ranks.run(*arguments, killed, cwd=tmp_path)
    assert ended.codes == [PREEMPTED, -signal.SIGKILL]
    assert ended.stderr[0].startswith(LOST) and ended.stderr[0].count("\n") == 1
    assert _summary(tmp_path)["status"] == "preempted"
    assert 0 < torch.load(last, weights_only=True)["global_step"] < 60
    ended = ranks.run(*arguments, cwd=tmp_path)
    assert ended.codes == [DONE, DONE], ended.stderr
    assert (_summary(tmp_path)["status"], _summary(tmp_path)["steps"]) == ("done", 60)
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        assert {int(row["step"]) for row in csv.DictReader(file)} >= set(range(60))


@pytest.mark.slow
def test_a_machine_that_is_lost_ends_the_job_and_the_same_command_goes_on(dataset, tmp_path):
    arguments = tiny.overrides(dataset, *LONG)
    last = tmp_path / "run/checkpoints/last.ckpt"
    with slurm(tmp_path, *arguments) as job:
        awaited(last.is_file, job)
        os.kill(int((tmp_path / "task1").read_text()), signal.SIGKILL)
        killed = time.monotonic()
        assert job.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL  # srun's: the highest
        assert time.monotonic() - killed < 20
    errors = (tmp_path / "err0").read_text()
    assert errors.startswith(LOST)
    assert errors.count("\n") == 1 and errors.endswith("again to resume from the last checkpoint\n")
    assert _summary(tmp_path)["status"] == "preempted"
    reached = torch.load(last, weights_only=True)["global_step"]
    assert 0 < reached < 60
    with slurm(tmp_path, *arguments, RESTART_COUNT="1") as job:
        assert job.wait(timeout=PATIENCE_S) == DONE, (tmp_path / "err0").read_text()
    assert (_summary(tmp_path)["status"], _summary(tmp_path)["steps"]) == ("done", 60)
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        assert {int(row["step"]) for row in csv.DictReader(file)} >= set(range(60))


def _summary(folder):
    return json.loads((folder / "run/summary.json").read_text())


@pytest.mark.parametrize(
    ("end", "code", "restarts", "requeued"),
    [
        ("exit 75", 75, "0", True),
        ("exit 75", 75, "2", False),
        ("exit 0", 0, "0", False),
        ("exit 1", 1, "0", False),
        *((killed_by(name), 75, "0", True) for name in ("HUP", "USR1", "TERM")),  # as while it imports
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_a_job_that_may_go_on_is_requeued(tmp_path, end, code, restarts, requeued, array):
    """With an interpreter that ends as a run would. The last task of an array has the number of the array."""
    task = {"ARRAY_JOB_ID": "4711", "ARRAY_TASK_ID": "3"} if array else {}
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"; {end}\n')
    python.chmod(0o755)
    with slurm(tmp_path, "a=1 2", "b", RESTART_COUNT=restarts, python=str(python), limit="2", **task) as job:
        assert job.wait(timeout=PATIENCE_S) == code
    assert (tmp_path / "out1").read_text() == "-m medconv.cli train data.num_workers=0 a=1 2 b\n"
    assert (tmp_path / "requeued").exists() == requeued
    assert not requeued or (tmp_path / "requeued").read_text() == f"requeue {'4711_3' if array else '4711'}\n"


def test_a_job_that_slurm_ends_already_is_not_requeued(tmp_path, monkeypatch):
    """A requeue would bring a cancelled job back."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 75\n")
    python.chmod(0o755)
    monkeypatch.setenv("STATE", "COMPLETING")
    with slurm(tmp_path, python=str(python)) as job:
        assert job.wait(timeout=PATIENCE_S) == PREEMPTED
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("second_task", "nodes", "code", "requeued"),
    [
        ("kill -KILL $$", "2", 128 + signal.SIGKILL, False),  # srun's code is the highest
        ("exit 75", "2", PREEMPTED, True),
        ("kill -ABRT $$", "2", PREEMPTED, True),
        ('echo "no such file" > $MEDCONV_ERROR_FILE; exit 1', "2", 128 + signal.SIGABRT, False),
        ("", "1", 128 + signal.SIGABRT, False),  # alone, so that nobody was lost
    ],
)
def test_a_process_that_a_watchdog_ends_is_one_that_lost_another(
    tmp_path, second_task, nodes, code, requeued
):
    """By SIGABRT, as the first task ends here."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ $SLURM_PROCID = 1 ] && {{ {second_task or 'true'}; }}\nkill -ABRT $$\n")
    python.chmod(0o755)
    (tmp_path / ".medconv-error-4711").write_text("of an earlier start\n")
    with slurm(tmp_path, RESTART_COUNT="1", JOB_NUM_NODES=nodes, python=str(python)) as job:
        assert job.wait(timeout=PATIENCE_S) == code
    assert (tmp_path / "requeued").exists() == requeued
    assert not (tmp_path / ".medconv-error-4711").exists()


@pytest.mark.slow
def test_two_machines_give_the_result_of_one_and_the_first_alone_writes(dataset, tmp_path):
    same = [*SAME, "data.samples_per_epoch=12", "trainer.max_steps=6"]
    one = tiny.train(dataset, tmp_path / "one", *same, "data.batch_size=4")  # prepares for them, too
    with two_machines(tmp_path, *tiny.overrides(dataset, *same, "run.dir=run")) as nodes:
        (output, errors), _ = [node.communicate(timeout=PATIENCE_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert "4 samples in each step" in output
    assert list((tmp_path / "node1").iterdir()) == []
    run = tmp_path / "node0/run"
    two = json.loads((run / "summary.json").read_text())
    assert two["steps"] == one["steps"] == 6 and two["hardware"]["devices"] == 2
    assert sorted(two["val/cases"]) == sorted(one["val/cases"])
    states = [
        torch.load(f / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for f in (tmp_path / "one", run)
    ]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torchrun_ends_too_and_only_a_shared_folder_goes_on(dataset, tmp_path):
    arguments = tiny.overrides(dataset, *LONG, "trainer.max_steps=100000")
    with two_machines(tmp_path, *arguments) as nodes:
        awaited((tmp_path / "node0/run/checkpoints/last.ckpt").is_file, nodes[0])
        power_off(nodes[1])
        killed = time.monotonic()
        errors = nodes[0].communicate(timeout=PATIENCE_S)[1]
    print(f"ended after {time.monotonic() - killed:.1f} s")
    assert nodes[0].returncode == 1 and LOST in errors and "exitcode  : 75" in errors
    assert time.monotonic() - killed < 30
    with two_machines(tmp_path, *arguments) as nodes:
        messages = [node.communicate(timeout=PATIENCE_S)[1] for node in nodes]
    for message in messages:
        assert re.search(
            r"error: run: not the same folder for all processes, they would resume at steps \[\d+, 0\]; it ",
            message,
        )


@pytest.mark.slow
def test_a_machine_that_does_not_answer_is_waited_for_in_bounds(dataset, tmp_path):
    arguments = tiny.overrides(dataset, *LONG, "trainer.max_steps=100000", "perf.timeout_seconds=10")
    with slurm(tmp_path, *arguments) as job:
        awaited((tmp_path / "run/checkpoints/last.ckpt").is_file, job)
        tasks = [int((tmp_path / f"task{rank}").read_text()) for rank in (0, 1)]
        os.kill(tasks[1], signal.SIGSTOP)
        stopped = time.monotonic()
        awaited((tmp_path / "err0").read_text, job)
        print(f"noticed after {time.monotonic() - stopped:.1f} s")
        assert 5 < time.monotonic() - stopped < 30
        os.kill(tasks[1], signal.SIGKILL)
        assert job.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL
    assert (tmp_path / "err0").read_text().startswith(LOST)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_machines_lost_again_and_again(dataset, tmp_path):
    """While processes start, prepare and meet, and while they train; either of them."""
    arguments = tiny.overrides(dataset, *LONG, "trainer.max_steps=600", "perf.timeout_seconds=20")
    times, seen, last = random.Random(0), [], tmp_path / "run/checkpoints/last.ckpt"
    for number in range(6):
        begun = time.time()
        with slurm(tmp_path, *arguments) as job:
            tasks = [tmp_path / f"task{rank}" for rank in (0, 1)]
            awaited(lambda tasks=tasks: all(task.is_file() for task in tasks), job)
            if number < 2:
                time.sleep(times.uniform(2, 20))  # to start takes that long, more or less
            else:
                awaited(lambda begun=begun: last.is_file() and last.stat().st_mtime > begun, job)
                time.sleep(times.uniform(0, 1))
            os.kill(int(tasks[number % 2].read_text()), signal.SIGKILL)
            killed = time.monotonic()
            assert job.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL
            seen.append(round(time.monotonic() - killed, 1))
            errors = (tmp_path / f"err{1 - number % 2}").read_text()
            assert errors.splitlines()[-1].startswith(LOST), (
                errors
            )  # before processes have met, torch says more
            for task in tasks:
                task.unlink()
    with slurm(tmp_path, *arguments) as job:
        assert job.wait(timeout=PATIENCE_S) == DONE, (tmp_path / "err0").read_text()
    print(f"the other ended after {seen} s")
    assert max(seen) < 2 * 20 + 25  # to meet is tried twice
    assert (_summary(tmp_path)["status"], _summary(tmp_path)["steps"]) == ("done", 600)
