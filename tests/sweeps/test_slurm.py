"""`hydra/launcher=slurm` with small stand-ins for sbatch, squeue and srun, which run the real
script.
"""

import csv
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.processes import Forked, until

from medconv.config import ConfigError
from medconv.sweeps import slurm
from medconv.sweeps.job import Job
from medconv.utils.exit_codes import DONE, INTERRUPTED, USER

# Runs the tasks of the array at once, each as Slurm would start it, and remembers the process that waits for
# them.
SBATCH = """#!/usr/bin/env bash
script=${!#}
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
output=$(sed -n 's/^#SBATCH --output=//p' "$script" | sed 's/%A/7/')
(
    for i in $(seq 0 "$last"); do
        SLURM_ARRAY_TASK_ID=$i SLURM_JOB_ID=$((8 + i)) bash "$script" > "${output/\\%a/$i}" 2>&1 &
    done
    wait
) > /dev/null 2>&1 &
echo $! > "$QUEUE"
sed 's/--job-name=//' <<< "$2" > "$QUEUE.name"
exec ${SLOW:-echo "7;cluster"}
"""
SQUEUE = """#!/usr/bin/env bash
# a process that has ended counts as ended before its parent has asked for its exit code
runs() { grep -qs '^State:.[^Z]' "/proc/$(cat "$QUEUE")/status"; }
[ "$2" = --name ] && [ "$3" = "$(cat "$QUEUE.name")" ] && { runs && echo 7; exit 0; }
[ "$3" = 7 ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
runs && echo "7_0 RUNNING" || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
"""
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec ${INSTEAD:-"$@"}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with Slurm."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, content in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": SRUN}.items():
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "QUEUE": str(tmp_path / "queue")}


def array(dataset: Path, *more: str) -> list[str]:
    launcher = ["hydra/launcher=slurm", "hydra.launcher.poll_seconds=0.2", "run.name=array"]
    return ["-m", *tiny.overrides(dataset, "logger=none", "callbacks=none"), *launcher, *more]


def test_an_array_runs_the_jobs_and_the_table_shows_their_results(
    dataset: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    code, output = Forked(*array(dataset, "model.norm=batch,nonsense"), cwd=tmp_path, **cluster).wait()
    assert code == USER, output
    home = tmp_path / "runs/array"
    with (home / "sweep.csv").open(newline="") as file:
        best, failed = csv.DictReader(file)
    assert (best["model.norm"], best["status"]) == ("batch", "done") and float(best["val/dice"]) > 0
    assert failed["reason"] == "exit code 1: model: norm must be one of ['batch', 'instance'], got 'nonsense'"
    assert "mean foreground" in (home / "slurm-7_0.log").read_text()
    assert "error: model: norm must be" in (home / "slurm-7_1.log").read_text()
    assert "array 7 with 2 jobs: logs are runs/array/slurm-7_*.log" in output
    assert not (home / "slurm.json").exists()


def test_a_dry_run_prints_the_script_and_submits_nothing(
    dataset: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
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


def test_a_stopped_sweep_leaves_its_array_and_finds_it_again(
    dataset: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
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


def test_a_job_ended_by_slurm_has_failed_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, str]
) -> None:
    """A script that is killed for its time or memory leaves no exit code."""
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin/srun").write_text("#!/bin/sh\nkill -9 $PPID\n")
    job = Job(("seed=1",), (), tmp_path / "home")
    monkeypatch.setattr(slurm, "_LATE", 0.1)
    slurm.run([job], {"poll_seconds": 0.1}, [])
    assert job.code == USER and job.status == "failed"
    assert job.reason.startswith("exit code 1: ended by Slurm (time limit, memory or scancel)")


# In place of srun: writes the summary that a run leaves, or fails.
ENDED = """#!/usr/bin/env bash
folder=$(echo "$@" | sed "s/.*run.dir='\\([^']*\\)'.*/\\1/")
echo "$folder" >> "$QUEUE.ran"
case "$*" in *"seed=$FAILS "*) exit 1 ;; esac
echo '{"status": "done", "val/dice": 0.5}' > "$folder/summary.json"
"""


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, str]) -> list[Job]:
    """Three jobs, of which seed=2 fails."""
    for name, value in {**cluster, "FAILS": "2"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin/srun").write_text(ENDED)
    return [Job((f"seed={seed}",), (), tmp_path / "home", config="abc") for seed in (1, 2, 3)]


def sent(tmp_path: Path) -> list[str]:
    """The folders of the jobs that ran since the last call."""
    ran = tmp_path / "queue.ran"
    folders = ran.read_text().splitlines() if ran.is_file() else []
    ran.unlink(missing_ok=True)
    return sorted(Path(line).name for line in folders)


def test_trained_jobs_are_not_submitted_again(
    tmp_path: Path, three: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody waited for its end. A failed job is, one of another config now, and one that is to
    begin anew.
    """
    first, second, third = (job.folder.path.name for job in three)
    slurm.run(three, {"poll_seconds": 0.1}, [])
    assert [job.code for job in three] == [0, 1, 0] and sent(tmp_path) == sorted([first, second, third])
    (tmp_path / "home/slurm.json").write_text(json.dumps({"array": "6", "jobs": [first, second, third]}))
    monkeypatch.setenv("FAILS", "0")
    slurm.run(three, {"poll_seconds": 0.1}, [])
    assert [job.code for job in three] == [0, 0, 0] and sent(tmp_path) == [second]
    three[2].config = "other"
    anew = Job(("seed=1", "run.resume=never"), (), tmp_path / "home", config="abc")
    for _ in range(2):
        slurm.run([anew], {"poll_seconds": 0.1}, [])
        assert sent(tmp_path) == [anew.folder.path.name]
    slurm.run(three, {"poll_seconds": 0.1}, [])
    assert sent(tmp_path) == [third]


def test_an_exit_code_that_appears_late_counts(
    tmp_path: Path, three: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system may show files of other machines late; without the code, the summary counts."""
    script = slurm._TEMPLATE
    monkeypatch.setattr(slurm, "_LATE", 20)
    monkeypatch.setattr(
        slurm,
        "_TEMPLATE",
        script.replace('echo "$code" >', '(sleep 1.5; echo "$code" >').replace(
            'exit_code"\n', 'exit_code") &\n'
        ),
    )
    slurm.run(three[1:2], {"poll_seconds": 0.1}, [])
    assert three[1].code == 1 and not three[1].has_error
    monkeypatch.setattr(slurm, "_LATE", 0.1)
    monkeypatch.setattr(slurm, "_TEMPLATE", script.replace('echo "$code" >', ": #"))
    slurm.run(three[:1], {"poll_seconds": 0.1}, [])
    assert three[0].code == 0


def test_an_array_is_found_by_its_name_if_sbatch_did_not_answer(
    tmp_path: Path, three: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_ANSWER", 1)
    monkeypatch.setenv("SLOW", "sleep 60")
    waits = f"#!/usr/bin/env bash\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.1; done\n"
    (tmp_path / "bin/srun").write_text(ENDED.replace("#!/usr/bin/env bash\n", waits))
    with pytest.raises(ConfigError, match="sbatch did not answer"):
        slurm.run(three, {"poll_seconds": 0.1}, [])
    monkeypatch.delenv("SLOW")
    threading.Timer(1, (tmp_path / "go").touch).start()
    slurm.run(three, {"poll_seconds": 0.1}, [])
    assert [job.code for job in three] == [0, 1, 0]
    assert len(sent(tmp_path)) == 3  # nothing was submitted twice


def test_without_squeue_the_sweep_is_refused(tmp_path: Path, three: list[Job]) -> None:
    (tmp_path / "bin/squeue").unlink()
    with pytest.raises(ConfigError, match="^hydra/launcher=slurm: there is no squeue on this machine"):
        slurm.run(three, {"poll_seconds": 0.1}, [])


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
    ],
)
def test_settings_of_the_wrong_type_are_refused(
    launcher: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm.script([Job(("seed=1",), (), tmp_path)], launcher, [])


def test_values_are_quoted_for_sbatch(tmp_path: Path) -> None:
    """A `#` would begin a comment, a blank end the value, and a % be filled in."""
    home = tmp_path / 'a #1 50% "b\\c"'
    lines = slurm.script([Job(("seed=1",), (), home)], {"partition": "gpu"}, []).splitlines()
    quoted = 'a #1 50{} \\"b\\\\c\\"'
    assert f'#SBATCH --output="{tmp_path}/{quoted.format("%%")}/slurm-%A_%a.log"' in lines
    assert f'#SBATCH --job-name="medconv-{quoted.format("%")}"' in lines
    assert "#SBATCH --partition=gpu" in lines


def test_srun_gets_the_number_of_cores_if_slurm_names_one(tmp_path: Path, cluster: dict[str, str]) -> None:
    """A cluster that assigns cores by GPU sets no variable, and srun must not get another number."""
    job = Job(("seed=1",), (), tmp_path / "home")
    job.folder.path.mkdir(parents=True)
    (tmp_path / "bin/srun").write_text('#!/bin/sh\necho "$1"\n')
    options = []
    for cores in ({}, {"SLURM_CPUS_PER_TASK": "6"}):
        done = subprocess.run(
            ["bash"],
            input=slurm.script([job], {}, []),
            text=True,
            capture_output=True,
            check=True,
            env={**os.environ, **cluster, "SLURM_ARRAY_TASK_ID": "0", **cores},
        )
        options.append(done.stdout.strip())
    assert options == ["--kill-on-bad-exit=0", "--cpus-per-task=6"]


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        (None, "hydra/launcher=slurm: there is no sbatch on this machine"),
        ("echo no such partition >&2; exit 1", "hydra/launcher=slurm: sbatch failed: no such partition"),
        ("echo hello", "hydra/launcher=slurm: sbatch said 'hello' instead of a job's number"),
    ],
)
def test_errors_of_sbatch_are_reported(
    sbatch: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if sbatch:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ConfigError, match=f"^{message}"):
        slurm.run([Job(("seed=1",), (), tmp_path / "home")], {}, ["seed"])
    assert not (tmp_path / "home/slurm.json").exists()


def test_overrides_with_special_characters_reach_the_job_unchanged(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    names = ("data.root='a b$(touch hit)'", 'run.name="q\'`x`"', '+x="a\\nb"')
    job = Job(names, (), tmp_path / "ho me")
    job.folder.path.mkdir(parents=True)
    content = slurm.script([job], {}, ["data.root"])
    show = tmp_path / "bin/show"
    show.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], "
        'os.environ["MEDCONV_SWEEP"]]))'
    )
    show.chmod(0o755)
    (tmp_path / "bin/srun").write_text(SRUN.replace('exec ${INSTEAD:-"$@"}', 'shift 4; exec show "$@"'))
    environment = {**os.environ, **cluster, "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(
        ["bash"], input=content, text=True, capture_output=True, check=True, env=environment, cwd=tmp_path
    )
    received: list[Any] = json.loads(done.stdout)
    assert received[0] == job.arguments and json.loads(received[1]) == {"data.root": "'a b$(touch hit)'"}
    assert not (tmp_path / "hit").exists()
    assert (job.folder.path / "exit_code").read_text() == "0\n"
    with pytest.raises(ConfigError, match="each option must be one line"):
        slurm.script([job], {"options": ["--x\nrm -r /"]}, [])


def test_a_preempted_job_is_requeued_a_limited_number_of_times(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    job = Job(("seed=1",), (), tmp_path / "home")
    job.folder.path.mkdir(parents=True)
    (tmp_path / "bin/scontrol").write_text('#!/bin/sh\necho "$@" > "$QUEUE"\n')
    (tmp_path / "bin/scontrol").chmod(0o755)
    (tmp_path / "stopped").write_text("exit 75")
    environment = {**os.environ, **cluster, "INSTEAD": f"bash {tmp_path}/stopped", "SLURM_JOB_ID": "9"}
    content, codes = slurm.script([job], {}, []), []
    for count in ("0", "50"):
        more = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": count}
        done = subprocess.run(
            ["bash"], input=content, text=True, check=False, env=environment | more, cwd=tmp_path
        )
        codes.append((done.returncode, (job.folder.path / "exit_code").exists()))
    assert codes == [(75, False), (75, True)]  # requeued; then restarted too often
    assert Path(cluster["QUEUE"]).read_text() == "requeue 9\n"
