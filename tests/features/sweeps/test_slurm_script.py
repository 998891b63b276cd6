"""medconv/features/sweeps/array_script.py: what sbatch and bash make of the script; settings that sbatch would misread."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers import slurm_tools
from helpers.slurm_tools import SRUN, killed_by

from medconv.config import ConfigError
from medconv.features.sweeps import array_script
from medconv.features.sweeps.batch_system import SLURM
from medconv.features.sweeps.job import Job

# The last task of an array has the number of the array.
LAST_TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "7"}


@pytest.fixture
def cluster(tmp_path):
    return slurm_tools.environment(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        (
            {"setup": "module load cuda"},
            r"hydra.launcher.setup must be a list, as in hydra.launcher.setup=\['module load",
        ),
        (
            {"options": "--exclusive"},
            r"hydra.launcher.options must be a list, as in .*=\['--exclusive'\], got '--excl",
        ),
        (
            {"time": 43200},
            "hydra.launcher.time must be quoted, as '04:00:00'; without quotes YAML reads 43200",
        ),
        ({"gres": "gpu:1"}, "hydra.launcher.gres: there is no such key for slurm; hydra.launcher.options"),
        ({"at_once": 0}, "hydra.launcher.at_once must be null or a number of at least 1, got 0"),
        ({"poll_seconds": -1}, "hydra.launcher.poll_seconds must be a number above 0, got -1"),
    ],
)
def test_settings_of_the_wrong_type_are_refused(launcher, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        array_script.script([Job(("seed=1",), (), tmp_path)], SLURM, launcher, [])


def test_values_are_quoted_for_sbatch(tmp_path):
    """A `#` would begin a comment, a blank end the value, and a % be filled in."""
    home = tmp_path / 'a #1 50% "b\\c"'
    lines = array_script.script([Job(("seed=1",), (), home)], SLURM, {"partition": "gpu"}, []).splitlines()
    quoted = 'a #1 50{} \\"b\\\\c\\"'
    assert f'#SBATCH --output="{tmp_path}/{quoted.format("%%")}/slurm-%A_%a.log"' in lines
    assert f'#SBATCH --job-name="medconv-{quoted.format("%")}"' in lines
    assert "#SBATCH --partition=gpu" in lines


def test_so_many_tasks_of_the_array_run_at_once(tmp_path):
    jobs = [Job((f"seed={seed}",), (), tmp_path) for seed in range(4)]
    for launcher, array in (({"at_once": 2}, "0-3%2"), ({"at_once": None}, "0-3")):
        lines = array_script.script(jobs, SLURM, launcher, ["seed"]).splitlines()
        assert f"#SBATCH --array={array}" in lines


def test_srun_gets_the_number_of_cores_if_slurm_names_one(tmp_path, cluster):
    """A cluster that assigns cores by GPU sets no variable, and srun must not get another number."""
    job = Job(("seed=1",), (), tmp_path / "home")
    job.folder.path.mkdir(parents=True)
    (tmp_path / "bin/srun").write_text('#!/bin/sh\necho "$1"\n')
    options = []
    for cores in ({}, {"SLURM_CPUS_PER_TASK": "6"}):
        done = subprocess.run(
            ["bash"],
            input=array_script.script([job], SLURM, {}, []),
            text=True,
            capture_output=True,
            check=True,
            env={**os.environ, **cluster, "SLURM_ARRAY_TASK_ID": "0", **cores},
        )
        options.append(done.stdout.strip())
    assert options == ["--kill-on-bad-exit=0", "--cpus-per-task=6"]


def test_overrides_with_special_characters_reach_the_job_unchanged(tmp_path, cluster):
    names = ("data.root='a b$(touch hit)'", 'run.name="q\'`x`"', '+x="a\\nb"')
    job = Job(names, (), tmp_path / "ho me")
    job.folder.path.mkdir(parents=True)
    content = array_script.script([job], SLURM, {}, ["data.root"])
    show = tmp_path / "bin/show"
    show.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], "
        'os.environ["MEDCONV_HPARAMS"]]))'
    )
    show.chmod(0o755)
    (tmp_path / "bin/srun").write_text(SRUN.replace('exec ${INSTEAD:-"$@"}', 'shift 4; exec show "$@"'))
    environment = {**os.environ, **cluster, "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(
        ["bash"], input=content, text=True, capture_output=True, check=True, env=environment, cwd=tmp_path
    )
    received = json.loads(done.stdout)
    assert received[0] == job.arguments and json.loads(received[1]) == {"data.root": "'a b$(touch hit)'"}
    assert not (tmp_path / "hit").exists()
    assert (job.folder.path / "exit_code").read_text() == "0\n"
    with pytest.raises(ConfigError, match="each option must be one line"):
        array_script.script([job], SLURM, {"options": ["--x\nrm -r /"]}, [])


@pytest.mark.parametrize("stopped", ["exit 75", *map(killed_by, ("TERM", "USR1", "HUP"))])
@pytest.mark.parametrize(
    ("settings", "requeued", "code_written"),
    [
        ({}, True, False),
        ({"SLURM_RESTART_COUNT": "50"}, False, True),
        ({"REFUSED": "1"}, False, True),
        ({"STATE": "COMPLETING"}, False, False),  # cancelled
    ],
)
def test_a_preempted_job_is_requeued_or_leaves_its_exit_code(
    tmp_path, cluster, settings, requeued, code_written, stopped
):
    """A job in the queue has no exit code, and a cancelled one none that asks for another start.

    A signal ends a process that is still importing.
    """
    job = Job(("seed=1",), (), tmp_path / "home")
    job.folder.path.mkdir(parents=True)
    (job.folder.path / "exit_code").write_text("1\n")  # of an earlier start
    (tmp_path / "stopped").write_text(stopped)
    environment = {**os.environ, **cluster, **LAST_TASK, **settings, "INSTEAD": f"bash {tmp_path}/stopped"}
    content = array_script.script([job], SLURM, {}, [])
    done = subprocess.run(["bash"], input=content, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 75
    queue = Path(cluster["QUEUE"] + ".tasks")
    assert queue.exists() == requeued and (not requeued or queue.read_text() == "0\n")
    code = job.folder.path / "exit_code"
    assert code.exists() == code_written and (not code_written or code.read_text() == "75\n")


@pytest.mark.parametrize(
    ("stopped", "tasks", "code"),
    [
        ("kill -ABRT $$", "2", 75),
        ("kill -ABRT $$", "1", 134),  # alone, so that nobody was lost
        ('echo "no such file" > "$MEDCONV_ERROR_FILE"; kill -ABRT $$', "2", 134),
    ],
)
def test_a_job_that_a_watchdog_ends_has_lost_a_process(tmp_path, cluster, stopped, tasks, code):
    """NCCL's ends a process by SIGABRT; what failed by itself is not tried again."""
    job = Job(("seed=1",), (), tmp_path / "home")
    job.folder.path.mkdir(parents=True)
    (tmp_path / "stopped").write_text(stopped)
    environment = {
        **os.environ,
        **cluster,
        **LAST_TASK,
        "SLURM_NTASKS": tasks,
        "INSTEAD": f"bash {tmp_path}/stopped",
    }
    content = array_script.script([job], SLURM, {}, [])
    done = subprocess.run(["bash"], input=content, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == code
    assert (job.folder.path / "exit_code").exists() == (code != 75)
    assert not list(job.folder.path.glob("error*"))
