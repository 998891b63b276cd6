"""medconv/features/sweeps/run.py: jobs one after another; how they end, and how a stopped sweep stops them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.cross_validations import by_fold
from helpers.waiting import until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from medconv.cli.entrypoint import guard
from medconv.features.sweeps import run
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
    monkeypatch.setattr(run, "_CTRL_C_SECONDS", 0.2)
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
    monkeypatch.setattr(run, "_CTRL_C_SECONDS", 0.2)
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
    assert run._exit_code(code) == USER
    assert run._exit_code(-signal.SIGSEGV) == BUG


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
