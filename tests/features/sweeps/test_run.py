"""medconv/features/sweeps/: jobs of a sweep, how they end, and their table."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import tiny
from helpers.cross_validations import by_fold
from helpers.launchers import TORCHRUN
from helpers.processes import FORKED, Forked
from helpers.waiting import until
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from medconv.cli import main
from medconv.cli.entrypoint import guard
from medconv.config import ConfigError, compose
from medconv.features.sweeps import job, run, run_job, table
from medconv.features.sweeps.job import Job
from medconv.targets.scores import DICE, MAE
from medconv.utils import child_processes
from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER


def forked(work):
    """The process id of a fork that ends with the exit code that `guard` gives."""
    pid = os.fork()
    if pid == 0:
        os.close(2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under `nohup pytest`
        os._exit(guard(work))
    return pid


JOB = """
import pathlib, signal, sys, time
received = []
def note(number, frame):
    received.append(number)
    pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, received)))
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT): signal.signal(number, note)
pathlib.Path(sys.argv[1] + ".begun").touch()
while len(received) < int(sys.argv[2]):
    time.sleep(0.02)
time.sleep(0.5)  # for signals beyond those expected
"""


@pytest.mark.parametrize(
    ("number", "whole_group", "received", "code"),
    [
        (signal.SIGTERM, False, [signal.SIGTERM], PREEMPTED),
        (signal.SIGUSR1, False, [signal.SIGUSR1], PREEMPTED),
        (signal.SIGHUP, False, [signal.SIGHUP], PREEMPTED),
        (signal.SIGINT, False, [signal.SIGTERM], INTERRUPTED),
        (signal.SIGINT, True, [signal.SIGINT, signal.SIGTERM], INTERRUPTED),  # as a terminal does
    ],
)
def test_a_stopped_sweep_stops_its_job_and_waits_for_it(
    number, whole_group, received, code, tmp_path, monkeypatch
):
    """Never by a second Ctrl-C, which would abort the run's step."""
    monkeypatch.setattr(child_processes, "_CTRL_C_SECONDS", 0.2)
    signals = tmp_path / "signals"
    job = [sys.executable, "-c", JOB, str(signals), str(len(received))]
    pid = forked(lambda: os.setpgid(0, 0) or run._run_process(job))
    until((tmp_path / "signals.begun").exists)
    (os.killpg if whole_group else os.kill)(pid, number)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == code
    assert signals.read_text() == " ".join(str(int(signum)) for signum in received)


class InterruptedStart(subprocess.Popen):
    """Ctrl-C comes after the process has begun, and before anybody waits for it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        until(Path("signals.begun").exists)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_sweep_that_is_stopped_as_it_starts_a_job_stops_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = SimpleNamespace(Popen=InterruptedStart, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run, "subprocess", started)
    monkeypatch.setattr(child_processes, "_CTRL_C_SECONDS", 0.2)
    pid = forked(lambda: run._run_process([sys.executable, "-c", JOB, "signals", "1"]))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == INTERRUPTED
    assert Path("signals").read_text() == str(int(signal.SIGTERM))


class Short(run.Job):
    """Runs its first override, a line of Python, with its folder as argument."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.overrides[0], str(self.folder.path)]


@pytest.mark.parametrize(
    ("code", "expected"), [(PREEMPTED, PREEMPTED), (INTERRUPTED, INTERRUPTED), (-signal.SIGUSR1, PREEMPTED)]
)
def test_a_stopped_job_stops_the_sweep(code, expected, tmp_path):
    end = f"raise SystemExit({code})" if code > 0 else f"import os; os.kill(os.getpid(), {-code})"
    both = [Short((end,), (), tmp_path), Short(("import sys; open(sys.argv[1], 'w')",), (), tmp_path)]
    pid = forked(lambda: run.run(both, {}) or DONE)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == expected
    assert not both[1].folder.path.exists()


LOST = (
    "import sys, pathlib as p; f = p.Path(sys.argv[1]); f.mkdir(exist_ok=True); (f / "
    "'error.txt').write_text('gone'); sys.exit(75)"
)


def test_a_job_that_lost_a_process_does_not_stop_the_others(tmp_path, capsys):
    both = [Short((LOST,), (), tmp_path), Short(("pass",), (), tmp_path)]
    run.run(both, {})
    assert [job.code for job in both] == [PREEMPTED, DONE]
    assert run.finish(both) == PREEMPTED and "failed, exit code 75: gone\n" in capsys.readouterr().out


def test_equal_jobs_are_run_once(tmp_path, capsys):
    """They share a folder."""
    count = "import sys; open(sys.argv[1] + '.count', 'a').write('x')"
    same = [Short((count,), (), tmp_path) for _ in range(3)]
    run.run(same, {})
    assert same[0].folder.path.with_suffix(".count").read_text() == "x"
    assert [job.code for job in same] == [0, 0, 0]
    assert run.plan(same, {}).count("medconv train") == 1
    run.finish(same)
    assert capsys.readouterr().out.count(f"  -     {same[0].folder.path}") == 1


def test_a_job_killed_by_the_system_is_the_users_error_a_crash_is_ours():
    code = run._run_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert run.Job((), (), Path("runs/x"), code).reason == "killed by SIGKILL"
    assert child_processes.exit_code(code) == USER
    assert child_processes.exit_code(-signal.SIGSEGV) == BUG


def test_the_hparams_page_shows_the_keys_in_which_the_runs_differ(sweep):
    pages = {}
    for number, path in by_fold(sweep.folder).items():
        events = EventAccumulator(str(path / "tensorboard")).Reload()
        data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        pages[number] = dict(HParamsPluginData.FromString(data).session_start_info.hparams)
        score = json.loads((path / "summary.json").read_text())["val/dice"]
        assert events.Scalars("val/dice_best")[-1].value == pytest.approx(score)
    assert {number: {k: v.number_value for k, v in page.items()} for number, page in pages.items()} == {
        number: {"data.fold": float(number)} for number in "012"
    }


def test_a_job_composes_its_config_from_the_same_places_as_the_sweep(dataset, tmp_path, monkeypatch):
    """`--config-name`, `--config-dir` and the user's own search path; its option fails in the job."""
    monkeypatch.setattr(run, "subprocess", FORKED)
    own, more = tmp_path / "own", tmp_path / "more"
    (more / "perf").mkdir(parents=True)
    (more / "perf/mine.yaml").write_text("matmul_precision: low\n")
    own.mkdir()
    lines = ["defaults:", "  - train", "  - override perf: mine", "  - _self_", "hydra:", "  mode: MULTIRUN"]
    (own / "mine.yaml").write_text("\n".join(lines) + "\n")
    options = ["--config-dir", str(own), "--config-name", "mine", f"hydra.searchpath=[file://{more}]"]
    code, output = Forked(*options, *tiny.overrides(dataset), "data.fold=0", cwd=tmp_path).wait()
    reason = "perf.matmul_precision must be highest, high or medium, got low"
    assert code == USER and output.count(f"error: {reason}") == 1, output
    assert f"failed, exit code 1: {reason}\n" in output


def test_hydras_own_settings_reach_the_jobs_but_for_those_of_the_sweep():
    of_hydra = [
        "hydra.mode=MULTIRUN",
        "hydra/launcher=slurm",
        "hydra.launcher.time='1:00'",
        "hydra.sweep.dir=x",
    ]
    kept = ["+hydra.job.env_set.FOO=1", "hydra/job_logging=default", "hydra.searchpath=[file:///x]"]
    settings = SimpleNamespace(
        runtime=SimpleNamespace(config_sources=[]),
        job=SimpleNamespace(config_name="train"),
        overrides=SimpleNamespace(hydra=[*of_hydra, *kept]),
    )
    assert job._config_flags(settings) == ("--config-name", "train", *kept)


@pytest.mark.parametrize("many", [True, False])
def test_a_dry_run_prints_the_config_or_the_commands(many, dataset, tmp_path):
    arguments = [*tiny.overrides(dataset), "run.name=planned", "run.dry_run=true"]
    code, output = Forked(*(["-m", "seed=1,2"] if many else []), *arguments, cwd=tmp_path).wait()
    assert code == DONE and not (tmp_path / "runs/planned").exists(), output
    if many:
        first, second = output.splitlines()
        assert first.startswith("medconv train ") and " seed=1 " in first and " seed=2 " in second
        assert "run.dry_run" not in output and "run.dir=" in first
        assert not (tmp_path / "runs/multirun.yaml").exists()
    else:
        assert output.startswith("# runs/planned\n") and "max_steps: 4" in output


def test_a_dry_run_finds_what_contradicts_in_any_job(dataset, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = [*tiny.overrides(dataset), "perf.cuda_graphs=false,true", "trainer.accumulate_grad_batches=2"]
    with pytest.raises(ConfigError, match="accumulate_grad_batches must be 1, got 2"):
        main.run(["train", "-m", *arguments, "run.dry_run=true"])


def test_a_sweep_under_torchrun_is_refused(launched, monkeypatch, tmp_path):
    launched(**TORCHRUN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="its jobs start their own processes; run it without torchrun"):
        main.run(["train", "-m", "seed=0,1"])


def test_a_job_that_fails_writes_why_into_its_folder(tmp_path):
    """The file distinguishes a job that lost a process from a stopped one; both end with 75."""
    sweep_job = Job(("a=1",), (), tmp_path, USER)
    with pytest.raises(ConfigError):
        run_job.train(sweep_job.folder.path, ["+mykey=1"])
    assert sweep_job.reason == "exit code 1: there is no key mykey; --cfg job prints all keys"
    assert sweep_job.has_error and sweep_job.begin() is None and not sweep_job.has_error


def test_the_order_of_overrides_does_not_change_the_folder():
    first = Job(("a=1", "data.fold=0"), (), Path("runs/x"))
    assert first.folder.path == Job(("data.fold=0", "a=1"), (), Path("runs/x")).folder.path
    assert first.folder.path != Job(("a=1", "data.fold=1"), (), Path("runs/x")).folder.path


def test_a_job_has_its_interpolations_as_they_were_typed():
    typed = ("run.name=fold${data.fold}", "model.strides=${derived.strides}")
    (composed,) = compose.compose(typed)
    assert Job.of(composed, typed).overrides == typed


@pytest.mark.parametrize("name", ["it's", "a\\b", "a\\", "a\\'b", 'a "b"', "a b,c=[1]"])
def test_a_folder_with_special_characters_reaches_the_job(name):
    sweep_job = Job(("a=1",), (), Path(name))
    (argument,) = [word for word in sweep_job.arguments if word.startswith("run.dir=")]
    assert OverridesParser.create().parse_override(argument).value() == str(sweep_job.folder.path)


def test_tables_show_values_as_they_were_typed():
    """Hydra's sweeper writes a colon as `\\:`."""
    limited = Job((r"trainer.max_time=00\:20\:00\:00", r"x='a\:b'"), (), Path("runs/x"))
    assert job.settings_of(limited, ["trainer.max_time", "x"]) == r"trainer.max_time=00:20:00:00 x='a\:b'"


def test_a_group_without_an_option_is_null_in_the_table():
    """`debug=null` reaches a job as `~debug`."""
    jobs = [Job((override,), (), Path("runs/x")) for override in ("~debug", "debug=limit")]
    assert job.varied(jobs) == ["debug"]
    assert [job.settings_of(each, ["debug"]) for each in jobs] == ["debug=null", "debug=limit"]


def test_a_sweep_without_a_name_is_named_by_what_varies():
    def home(*typed):
        return job.home(OmegaConf.create({"run": {"dir": None, "name": None}}), ["seed=1,2", *typed])

    same = [
        "hydra/launcher=slurm",
        "hydra.launcher.time='01:00:00'",
        "data.fold=0,1",
        "hydra.sweeper.n_trials=3",
    ]
    assert {home(override) for override in same} == {home()}
    assert len({home(), home("hparams_search=recipe"), home("hparams_search=mine")}) == 3


def test_the_lowest_error_is_first(tmp_path):
    jobs = []
    for number, score in enumerate((3.0, 1.0, None, 2.0)):
        jobs.append(Job((f"seed={number}",), (), tmp_path, 0))
        jobs[-1].folder.path.mkdir(parents=True)
        summary = {"score": MAE.plain(), "val/mae": score, "status": "done"}
        (jobs[-1].folder.path / "summary.json").write_text(json.dumps(summary))
    assert [job.overrides[0][-1] for job in table.ranked(jobs)] == ["1", "3", "0", "2"]
    header, first, *_ = table.write(tmp_path, jobs).read_text().splitlines()
    assert header.startswith("seed,val/mae,steps") and first.startswith("1,1.0")
    assert "1.0000" in table.text(jobs).splitlines()[1]


def test_the_best_dice_is_first_and_failures_are_last_with_their_reason(tmp_path):
    scores = [{"box": 0.5, "hole": 0.7}, {"box": 0.9, "hole": None}]
    jobs = [Job((f"optimizer.lr={rate}", "seed=0"), (), tmp_path, 0) for rate in ("1e-3", "1e-2", "1e-1")]
    for each, dice in zip(jobs, scores, strict=False):
        each.folder.path.mkdir()
        mean = np.mean([value for value in dice.values() if value is not None])
        summary = {"val/dice": mean, "val/dice_per_class": dice, "score": DICE.plain(), "steps": 4}
        (each.folder.path / "summary.json").write_text(json.dumps(summary))
    jobs[2].write_error("no such norm")
    jobs[2].code = USER
    folders = [job.folder.path for job in jobs]
    assert table.text(jobs).splitlines() == [
        "sweep, best first",
        f"  0.9000  {folders[1]}  optimizer.lr=1e-2",
        f"  0.6000  {folders[0]}  optimizer.lr=1e-3",
        f"    -     {folders[2]}  optimizer.lr=1e-1  failed, exit code 1: no such norm",
    ]
    with table.write(tmp_path, jobs).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer.lr"] for row in rows] == ["1e-2", "1e-3", "1e-1"]
    assert [row["val/dice/box"] for row in rows] == ["0.9", "0.5", ""]
    assert [row["val/dice/hole"] for row in rows] == ["", "0.7", ""]
    assert [row["status"] for row in rows] == ["done", "done", "failed"]
    assert "seed" not in rows[0]  # equal in all jobs
