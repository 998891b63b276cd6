"""`hydra/launcher=slurm` with stand-ins for sbatch, squeue and srun, which run the real script."""

import csv
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import slurm_tools, tiny
from helpers.configs import composed
from helpers.processes import Forked
from helpers.waiting import PATIENCE_S, until
from omegaconf import OmegaConf

from medconv.config import ConfigError
from medconv.features.sweeps import array_script, batch_system, job_array
from medconv.features.sweeps.batch_system import SLURM
from medconv.features.sweeps.job import Job
from medconv.utils.exit_codes import DONE, INTERRUPTED, USER


@pytest.fixture
def cluster(tmp_path):
    return slurm_tools.environment(tmp_path)


def array(dataset, *more):
    launcher = ["hydra/launcher=slurm", "hydra.launcher.poll_seconds=0.2", "run.name=array"]
    return ["-m", *tiny.overrides(dataset, "logger=none"), *launcher, *more]


def test_an_array_runs_the_jobs_and_the_table_shows_their_results(dataset, tmp_path, cluster):
    code, output = Forked(*array(dataset, "model.norm=batch,nonsense"), cwd=tmp_path, **cluster).wait()
    assert code == USER, output
    home = tmp_path / "runs/array"
    with (home / "sweep.csv").open(newline="") as file:
        best, failed = csv.DictReader(file)
    assert (best["model.norm"], best["status"]) == ("batch", "done") and float(best["val/dice"]) > 0
    assert failed["reason"] == "exit code 1: model: norm must be one of ['batch', 'instance'], got 'nonsense'"
    assert "mean foreground" in (home / "slurm-7_0.log").read_text()
    assert "error: model: norm must be" in (home / "slurm-7_1.log").read_text()
    assert "array 7 with 2 jobs; their logs are in runs/array" in output
    assert not (home / "array.json").exists()


def test_a_dry_run_prints_the_script_and_submits_nothing(dataset, tmp_path, cluster):
    options = ["hydra.launcher.time='01:30:00'", "hydra.launcher.gpus_per_node=4", "hydra.launcher.at_once=1"]
    more = ['hydra.launcher.options=["--constraint=a100"]', "hydra.launcher.setup=['module load cuda']"]
    arguments = array(dataset, "optimizer.lr=1e-3,1e-2", *options, *more)
    code, output = Forked(*arguments, "run.dry_run=true", cwd=tmp_path, **cluster).wait()
    assert code == DONE, output
    for line in (
        *(
            "#SBATCH --array=0-1%1",
            "#SBATCH --time=01:30:00",
            "#SBATCH --gpus-per-node=4",
            "#SBATCH --constraint=a100",
        ),
        *("#SBATCH --job-name=medconv-array", "module load cuda", "#SBATCH --requeue"),
    ):
        assert f"\n{line}\n" in output
    assert "partition" not in output  # null: the cluster's default
    assert not Path(cluster["QUEUE"]).exists() and not (tmp_path / "runs/array").exists()
    checked = subprocess.run(["bash", "-n"], input=output, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    # the folders are those that the sweep itself takes
    assert "run.dry_run" not in output and output.count("optimizer.lr=0.001 ") == 1


def test_a_stopped_sweep_leaves_its_array_and_finds_it_again(dataset, tmp_path, cluster):
    arguments = array(dataset, "seed=1,2")
    (tmp_path / "busy").write_text(f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done\n")
    first = Forked(*arguments, cwd=tmp_path, INSTEAD=f"bash {tmp_path}/busy", **cluster)
    until(lambda: "array 7 with 2 jobs" in first.output.read_text() or first.ended())
    queued = (tmp_path / "queue").read_text()
    os.kill(first.pid, signal.SIGINT)
    code, output = first.wait()
    assert (
        code == INTERRUPTED
        and "array 7 stays in the queue: run the same command again to wait for it" in output
    )
    code, output = Forked(*array(dataset, "seed=3"), cwd=tmp_path, **cluster).wait()
    assert code == USER and "array 7 with other jobs of this sweep is in the queue" in output, output
    third = Forked(*arguments, cwd=tmp_path, **cluster)
    until(lambda: "array 7 with 2 jobs" in third.output.read_text() or third.ended())
    (tmp_path / "go").touch()
    code, output = third.wait()
    assert (tmp_path / "queue").read_text() == queued  # nothing was submitted again
    assert code == DONE and output.count("  -     runs/array/") == 2, output


def test_ctrl_c_as_the_array_is_named_leaves_it_in_the_queue(three, monkeypatch, capsys):
    def interrupted(text, **settings):
        print(text, **settings)
        if "logs are" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(job_array, "print", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    assert "array 7 stays in the queue" in capsys.readouterr().out


def test_a_job_ended_by_slurm_has_failed_with_that_reason(tmp_path, monkeypatch, cluster):
    """A script that is killed for its time or memory leaves no exit code."""
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin/srun").write_text("#!/bin/sh\nkill -9 $PPID\n")
    job = Job(("seed=1",), (), tmp_path / "home")
    monkeypatch.setattr(job_array, "_VISIBLE_SECONDS", 0.1)
    job_array.run([job], SLURM, {"poll_seconds": 0.1}, [])
    assert job.code == USER and job.status == "failed"
    assert job.reason.startswith("exit code 1: ended by the batch system (time limit, memory or scancel)")


# In place of srun: writes the summary that a run leaves, or fails, or is preempted at first.
ENDED = """#!/usr/bin/env bash
folder=$(echo "$@" | sed "s/.*run.dir='\\([^']*\\)'.*/\\1/")
echo "$folder" >> "$QUEUE.ran"
case "$*" in
    *"seed=$FAILS "*) exit 1 ;;
    *"seed=$PREEMPTED "*) [ "$SLURM_RESTART_COUNT" = 0 ] && exit 75 ;;
esac
echo '{"status": "done", "val/dice": 0.5}' > "$folder/summary.json"
"""


@pytest.fixture
def three(tmp_path, monkeypatch, cluster):
    """Three jobs, of which seed=2 fails."""
    for name, value in {**cluster, "FAILS": "2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin/srun").write_text(ENDED)
    return [Job((f"seed={seed}",), (), tmp_path / "home", config="abc") for seed in (1, 2, 3)]


def sent(tmp_path):
    """The folders of the jobs that ran since the last call."""
    ran = tmp_path / "queue.ran"
    folders = ran.read_text().splitlines() if ran.is_file() else []
    ran.unlink(missing_ok=True)
    return sorted(Path(line).name for line in folders)


@pytest.mark.parametrize("preempted", ["1", "3"])
def test_a_preempted_job_alone_is_requeued(tmp_path, three, monkeypatch, preempted):
    """The first of the array, or the last, whose number is also that of the array."""
    monkeypatch.setenv("PREEMPTED", preempted)
    job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    again = three[int(preempted) - 1].folder.path.name
    assert [job.code for job in three] == [0, 1, 0]
    assert sent(tmp_path) == sorted([*(job.folder.path.name for job in three), again])


def test_trained_jobs_are_not_submitted_again(tmp_path, three, monkeypatch):
    """Also where nobody waited for its end. A failed job is, one of another config now, and one that is to
    begin anew.
    """
    first, second, third = (job.folder.path.name for job in three)
    job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    assert [job.code for job in three] == [0, 1, 0] and sent(tmp_path) == sorted([first, second, third])
    (tmp_path / "home/array.json").write_text(json.dumps({"array": "6", "jobs": [first, second, third]}))
    monkeypatch.setenv("FAILS", "0")
    job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    assert [job.code for job in three] == [0, 0, 0] and sent(tmp_path) == [second]
    three[2].config = "other"
    anew = Job(("seed=1", "run.resume=never"), (), tmp_path / "home", config="abc")
    for _ in range(2):
        job_array.run([anew], SLURM, {"poll_seconds": 0.1}, [])
        assert sent(tmp_path) == [anew.folder.path.name]
    job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    assert sent(tmp_path) == [third]


def test_a_trained_job_is_submitted_again_if_its_files_changed(dataset, tmp_path, three):
    """The job then compares the images themselves, on a machine of the cluster."""
    data = shutil.copytree(dataset, tmp_path / "data")
    job = three[0]
    job.data = json.dumps(OmegaConf.to_container(composed(*tiny.overrides(data)).data))
    folder = job.folder.path.name
    runs = []
    for change in (lambda: None, lambda: os.utime(data / "imagesTr/case_1.nii.gz", (1, 1)), lambda: None):
        change()
        job_array.run([job], SLURM, {"poll_seconds": 0.1}, [])
        runs.append(sent(tmp_path))
    assert runs == [[folder], [folder], []]
    job.data = job.data.replace(str(data), str(tmp_path / "nowhere"))
    job_array.run([job], SLURM, {"poll_seconds": 0.1}, [])
    assert sent(tmp_path) == [folder]


def test_an_exit_code_that_appears_late_counts(tmp_path, three, monkeypatch):
    """A shared file system may show files of other machines late; without the code, the summary counts."""
    script = array_script._SLURM
    monkeypatch.setattr(job_array, "_VISIBLE_SECONDS", PATIENCE_S)
    monkeypatch.setattr(
        array_script,
        "_SLURM",
        script.replace(
            'echo "$code" > "$folder/exit_code"', '(sleep 1.5; echo "$code" > "$folder/exit_code") &'
        ),
    )
    job_array.run(three[1:2], SLURM, {"poll_seconds": 0.1}, [])
    assert three[1].code == 1 and not three[1].has_error
    monkeypatch.setattr(job_array, "_VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr(array_script, "_SLURM", script.replace('echo "$code" >', ": #"))
    job_array.run(three[:1], SLURM, {"poll_seconds": 0.1}, [])
    assert three[0].code == 0


class Unanswered:
    """In the place of the module `subprocess`: a command does what it is to do, and its answer is too late."""

    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def run(command: Sequence[str], *, timeout: float, **settings: Any) -> None:
        subprocess.run(command, **settings)
        raise subprocess.TimeoutExpired(command, timeout)


def test_an_array_is_found_by_its_name_if_sbatch_did_not_answer(tmp_path, three, monkeypatch):
    """The jobs begin once the array was found."""
    monkeypatch.setattr(batch_system, "subprocess", Unanswered)
    waits = f"#!/usr/bin/env bash\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.1; done\n"
    (tmp_path / "bin/srun").write_text(ENDED.replace("#!/usr/bin/env bash\n", waits))
    with pytest.raises(ConfigError, match="sbatch did not answer"):
        job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    monkeypatch.setattr(batch_system, "subprocess", subprocess)
    wait = job_array._wait
    monkeypatch.setattr(job_array, "_wait", lambda *about: ((tmp_path / "go").touch(), wait(*about)))
    job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])
    assert [job.code for job in three] == [0, 1, 0]
    assert len(sent(tmp_path)) == 3  # nothing was submitted twice


def test_without_squeue_the_sweep_is_refused(tmp_path, three, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # this machine may have Slurm
    (tmp_path / "bin/squeue").unlink()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 7\n")
    with pytest.raises(ConfigError, match="^hydra/launcher=slurm: there is no squeue on this machine"):
        job_array.run(three, SLURM, {"poll_seconds": 0.1}, [])


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        (None, "hydra/launcher=slurm: there is no sbatch on this machine"),
        ("echo no such partition >&2; exit 1", "hydra/launcher=slurm: sbatch failed: no such partition"),
        ("echo hello", "hydra/launcher=slurm: sbatch answered 'hello', expected a job number"),
    ],
)
def test_errors_of_sbatch_are_reported(sbatch, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if sbatch:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ConfigError, match=f"^{message}"):
        job_array.run([Job(("seed=1",), (), tmp_path / "home")], SLURM, {}, ["seed"])
    assert not (tmp_path / "home/array.json").exists()
