"""hydra/launcher=pbs, sge and lsf with a small stand-in, which runs the real script; none ran on a real one.

It is about what is ours: the text of the script, the variable with a task's number, how a task ends.
"""

import os
import signal
import subprocess
import sys

import pytest
from helpers import tiny
from helpers.waiting import until
from omegaconf import OmegaConf

from medconv.config import ConfigError
from medconv.features.sweeps import job_array
from medconv.features.sweeps.array_script import script
from medconv.features.sweeps.batch_system import BatchSystem
from medconv.features.sweeps.job import Job
from medconv.utils import cluster
from medconv.utils.exit_codes import DONE, PREEMPTED, USER

# Runs each task in the way of the three: their number is in the variable that the test names
SUBMIT = """#!/usr/bin/env bash
cat > "$QUEUE.script"
for i in $TASKS; do env "$INDEX=$i" bash "$QUEUE.script" >> "$QUEUE.log" 2>&1; done
echo "$ANSWER"
"""
# Lines of directives of a sweep of two jobs, one at a time; what the system answers, and the array's number in it
SYSTEMS = {
    "pbs": (["#PBS -N medconv-home", "#PBS -J 1-2%1", "#PBS -r y", "#PBS -q gpu"], "77[].server", "77[]"),
    "sge": (["#$ -N medconv-home", "#$ -t 1-2 -tc 1", "#$ -notify", "#$ -q gpu"], "77.1-2:1", "77"),
    "lsf": (
        ['#BSUB -J "medconv-home[1-2]%1"', "#BSUB -Q 75", "#BSUB -q gpu"],
        "Job <77> is submitted.",
        "77",
    ),
}
SUBMITS = {"pbs": "qsub", "sge": "qsub", "lsf": "bsub"}


def launcher(name, **settings):
    content = OmegaConf.load(tiny.ROOT / f"conf/hydra/launcher/{name}.yaml")
    words = OmegaConf.to_container(content)
    return {**words, "poll_seconds": 0.1, **settings}


def system(settings):
    found = BatchSystem.of(settings)
    assert found is not None
    return found


def jobs(home, *overrides):
    return [Job(overrides=(override,), flags=(), home=home) for override in overrides]


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_script_has_the_directives_of_its_system(name, tmp_path):
    settings = launcher(name, at_once=1, options=["-q gpu"])
    text = script(jobs(tmp_path / "home", "seed=0", "seed=1"), system(settings), settings, ["seed"])
    directives, _, _ = SYSTEMS[name]
    assert set(directives) <= set(text.splitlines())
    assert f'case "${system(settings).index}" in\n    1) ' in text
    assert "SLURM" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_task_runs_its_job(name, tmp_path, monkeypatch):
    """An array of one job has two tasks, for PBS. A line of bash is in the place of Python, which the array of Slurm
    starts.
    """
    settings = launcher(name)
    monkeypatch.setattr(sys, "executable", str(payload_of(tmp_path, "exit 1")))
    _, answer, number = SYSTEMS[name]
    stand_in(tmp_path, monkeypatch, SUBMITS[name], {"INDEX": system(settings).index, "ANSWER": answer})
    asked = tmp_path / "asked"
    poll = system(settings).poll.split()[0]
    tool(
        tmp_path,
        poll,
        f'#!/bin/sh\necho "$@" >> {asked}\necho "qstat: Unknown Job, do not exist, is not found" >&2\nexit 1\n',
    )
    one = jobs(tmp_path / "home", "no_such_key=1")
    job_array.run(one, system(settings), settings, ["no_such_key"])
    assert one[0].code == USER
    assert asked.read_text().split()[-1] == number


# What the process does, and the exit codes of script and folder; none: no file
ENDS = {
    "done": ("exit 0", "pbs", DONE, "0"),
    "failed": ("exit 1", "sge", 1, "1"),
    "preempted, no word for it": ("exit 75", "pbs", PREEMPTED, "75"),
    "preempted, SGE": ("exit 75", "sge", 99, ""),
    "preempted, LSF": ("exit 75", "lsf", PREEMPTED, ""),
    "still importing": ("kill -TERM $$", "sge", 99, ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_preempted_task_is_queued_again(end, tmp_path):
    process, name, code, written = ENDS[end]
    done, folder = run_task(tmp_path, name, process)
    assert done.wait() == code
    file = folder / "exit_code"
    assert (file.read_text().strip() if file.exists() else "") == written


def test_a_signal_to_the_script_alone_reaches_its_process(tmp_path):
    saves = "trap 'exit 75' TERM; echo $PPID > ready; while true; do sleep 0.1; done"
    done, _ = run_task(tmp_path, "sge", saves)
    until((tmp_path / "ready").exists)
    os.kill(done.pid, signal.SIGUSR2)
    assert done.wait() == 99


def test_a_task_that_never_goes_on_is_not_queued_for_ever(tmp_path):
    done, folder = run_task(tmp_path, "sge", "exit 75", restarts=50)
    assert done.wait() == PREEMPTED
    assert (folder / "exit_code").read_text() == "75\n"


def test_a_restarted_task_goes_on_with_its_own_run(tmp_path, monkeypatch):
    """With run.resume=never, too: each restart would else move aside what the last one trained."""
    monkeypatch.setenv("JOB_ID", "17")
    seen = []
    for _ in range(2):
        told = 'echo "$MEDCONV_JOB $MEDCONV_RESTARTS" > told; exit 75'
        done, folder = run_task(tmp_path / str(len(seen)), "sge", told, restarts=len(seen))
        assert done.wait() == 99 and not any(folder.iterdir())
        seen.append((tmp_path / str(len(seen)) / "told").read_text())
    assert seen == ["17 0\n", "17 1\n"]
    monkeypatch.setenv("MEDCONV_JOB", "17")
    for restarts in (0, 1):
        monkeypatch.setenv("MEDCONV_RESTARTS", str(restarts))
        assert (cluster.job(), cluster.restarted()) == ("MEDCONV_JOB=17", bool(restarts))


# Words of a system, and what the error says
WRONG = [
    ({"system": {"name": "mine"}}, "hydra.launcher.system: cancel is missing"),
    ({"system": {"name": "mine", "nonsense": 1}}, "hydra.launcher.system: nonsense is unknown"),
    ({"system": {**launcher("pbs")["system"], "index": 3}}, "hydra.launcher.system.index must be str, got 3"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_words_are_an_error(words, message):
    with pytest.raises(ConfigError, match=message):
        BatchSystem.of({**launcher("pbs"), **words})


def test_a_system_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = launcher("pbs")
    with pytest.raises(ConfigError, match="hydra/launcher=pbs: there is no qsub on this machine"):
        job_array.run(jobs(tmp_path / "home", "seed=0"), system(settings), settings, ["seed"])


def run_task(tmp_path, name, process, restarts=0):
    """The first task of a script, with a line of bash in the place of Python; and its folder."""
    settings = launcher(name)
    [job] = jobs(tmp_path / "home", "seed=0")
    job.folder.path.mkdir(parents=True)
    if restarts:
        job.folder.path.with_name(f"{job.folder.path.name}.restarts").write_text(f"{restarts}\n")
    payload = str(payload_of(tmp_path, process))
    text = script([job], system(settings), settings, ["seed"]).replace(sys.executable, payload)
    environment = {**os.environ, system(settings).index: "1"}
    return subprocess.Popen(["bash", "-c", text], env=environment), job.folder.path


def payload_of(folder, process):
    payload = folder / "payload"
    payload.write_text(f"#!/usr/bin/env bash\ncd {folder}\n{process}\n")
    payload.chmod(0o755)
    return payload


def stand_in(folder, monkeypatch, submit, variables):
    tool(folder, submit, SUBMIT)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    for key, value in {**variables, "QUEUE": str(folder / "queue"), "TASKS": "1 2"}.items():
        monkeypatch.setenv(key, value)


def tool(folder, name, content):
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(content)
    (folder / "bin" / name).chmod(0o755)
