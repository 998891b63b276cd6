"""medconv/training/run_dir.py: where a run resumes, its summary, its lock, and logs cut back."""

import fcntl
import os
from pathlib import Path

import pytest
import torch

from medconv.config import ConfigError
from medconv.config.schema import RunConfig, RunSettings
from medconv.training import log_files
from medconv.training.run_dir import ResumeSource, RunDir, find_source, read_config
from medconv.utils.atomic_io import replacing


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            b"\xff\xfe",
            "[" * 100_000,
            '{"val/dice": "x"}',
            '{"val/cases": []}',
            '{"val/cases": {"a": 1}}',
        ),
        *(
            '{"val/cases": {"a": {"x": "1"}}}',
            '{"val/cases": {"a": {"x": 1}, "b": {"y": 1}}}',
            '{"skipped_cases": [1]}',
        ),
    ],
)
def test_a_damaged_summary_is_an_error_with_its_path(content, tmp_path):
    path = tmp_path / "summary.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^{path}: (cannot be read \(|not what medconv writes there)"):
        RunDir(tmp_path).summary()


@pytest.mark.parametrize("resume", ["never", "PATH"])
def test_a_job_that_its_launcher_restarts_resumes(launched, tmp_path, resume):
    """Whatever `run.resume` says; but not from the checkpoint of another job."""
    folder = RunDir(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.last.touch()
    (tmp_path / "other.ckpt").touch()
    requested = "never" if resume == "never" else str(tmp_path / "other.ckpt")
    config = RunConfig(run=RunSettings(dir=str(folder.path), name="x", resume=requested))
    resumes = []
    for job, restarts in ((12, 0), (12, 1), (13, 1)):
        (folder.path / "summary.json").write_text('{"job": "SLURM_JOB_ID=12"}')
        launched(SLURM_JOB_ID=job, SLURM_RESTART_COUNT=restarts)
        resumes.append(RunDir.of(config, {}).resume)
    assert resumes == [requested, "auto", requested]
    launched(TORCHELASTIC_RUN_ID="x", TORCHELASTIC_RESTART_COUNT=2)
    (folder.path / "summary.json").write_text('{"job": "TORCHELASTIC_RUN_ID=x"}')
    assert RunDir.of(config, {}).resume == "auto"
    folder.last.unlink()
    assert RunDir.of(config, {}).resume == requested  # it was stopped before its first checkpoint


def test_a_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path, caplog):
    config = RunConfig(run=RunSettings(dir=str(tmp_path / "run"), name="x"))
    for said in (False, True):
        folder = RunDir(tmp_path / "run")
        caplog.clear()
        with caplog.at_level("INFO"):
            folder.begin(config)
        folder.close()
        assert ("nothing to resume" in caplog.text) == said


def test_a_checkpoint_that_another_process_wrote_meanwhile_is_continued(tmp_path):
    """It trained here while this one prepared its data; its last rows are not cut off."""
    folder = RunDir(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)

    def save(steps):
        content = {"medconv": {}, "state_dict": {}, "curves": {"metrics.csv": 1 + steps}}
        with replacing(folder.last) as partial:
            torch.save(content, partial)
        rows = [f"{step}\n" for step in range(steps)]
        (folder.path / "metrics.csv").write_text("step\n" + "".join(rows))

    save(1)
    assert folder.resume_from() == folder.last
    save(3)
    folder.begin(RunConfig(run=RunSettings(dir=str(folder.path), name="x")))
    folder.close()
    assert (folder.path / "metrics.csv").read_text() == "step\n0\n1\n2\n"


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"medconv": {}, "state_dict": {}, "curves": {"metrics.csv": rows}}, path)
    return path


def test_the_last_checkpoint_is_continued_and_a_damaged_one_is_not(tmp_path):
    assert find_source(tmp_path, "auto") == ResumeSource(None, {})
    last, previous = write(tmp_path / "last.ckpt", 9), write(tmp_path / "previous.ckpt", 5)
    assert find_source(tmp_path, "auto") == ResumeSource(last, {"metrics.csv": 9})
    assert find_source(tmp_path, "never") == ResumeSource(None, {})
    last.write_bytes(last.read_bytes()[:100])
    assert find_source(tmp_path, "auto") == ResumeSource(previous, {"metrics.csv": 5})
    previous.unlink()
    with pytest.raises(ConfigError, match=r"there is no earlier checkpoint, run\.resume=never"):
        find_source(tmp_path, "auto")


def test_if_all_checkpoints_are_damaged_the_error_says_what_to_do(tmp_path):
    for name in ("last.ckpt", "previous.ckpt"):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"previous\.ckpt.*run\.resume=never.*run\.resume=\S+best\.ckpt"):
        find_source(tmp_path, "auto")


def test_logs_of_another_folder_are_not_continued(tmp_path):
    inside, outside = write(tmp_path / "own/best.ckpt", 7), write(tmp_path / "other/last.ckpt", 7)
    assert find_source(tmp_path / "own", str(inside)) == ResumeSource(inside, {"metrics.csv": 7})
    assert find_source(tmp_path / "own", str(outside)) == ResumeSource(outside, {})


def test_a_huge_config_is_refused_unread(tmp_path):
    path = tmp_path / "config.yaml"
    path.touch()
    os.truncate(path, 2**40)  # a hole, which takes no disk
    with pytest.raises(ConfigError, match="damaged .*1048576 MB, a config has at most 16"):
        read_config(path, Path("last.ckpt"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "missing"),
        ("", "empty, or not a config"),
        ("seed: 1", "empty, or not a config"),
        ("a: [", "damaged"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nderived: {c: [*b, *b]}", "damaged .*aliases"),
        ("[" * 1000, "damaged"),  # deeper than Python recurses,
    ],
)
def test_a_config_that_cannot_be_read_is_an_error(tmp_path, content, problem):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"{problem}.*run\.resume=last\.ckpt with another run\.name"):
        read_config(path, Path("last.ckpt"))
    path.write_text("derived: {size: large}")
    assert read_config(path, Path("last.ckpt")) == {"derived": {"size": "large"}}


def is_refused(folder):
    """Whether another process cannot take the lock."""
    pid = os.fork()
    if pid == 0:
        try:
            RunDir(folder).claim()
        except ConfigError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_one_process_holds_the_lock_until_it_closes_it(tmp_path):
    (tmp_path / ".lock").write_text("of a process that was killed on another machine")
    run = RunDir(tmp_path)
    run.claim()
    run.claim()
    assert is_refused(tmp_path)
    run.close()
    assert not is_refused(tmp_path)


@pytest.mark.parametrize("makes_new", [False, True])
def test_a_folder_that_is_moved_meanwhile_is_not_locked(makes_new, tmp_path, monkeypatch):
    """By another process that starts with `run.resume=never`, between opening and locking the file."""
    folder = tmp_path / "run"
    folder.mkdir()
    take = fcntl.lockf

    def after_the_move(*arguments):
        folder.rename(tmp_path / "moved")
        if makes_new:
            folder.mkdir()
            (folder / ".lock").touch()
        take(*arguments)

    monkeypatch.setattr(fcntl, "lockf", after_the_move)
    with pytest.raises(ConfigError, match="run: another process is training there"):
        RunDir(folder).claim()


def test_a_folder_that_is_gone_is_not_locked(tmp_path):
    with pytest.raises(ConfigError, match="another process is training there"):
        RunDir(tmp_path / "run").claim()


def test_logs_are_cut_back_to_their_measured_sizes(tmp_path):
    events = tmp_path / "tensorboard/events.out.tfevents.1"
    events.parent.mkdir()
    events.write_bytes(b"12345")
    # of another run, whose folder is inside this one
    other = tmp_path / "longer/tensorboard/events.out.tfevents.3"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"123")
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1.0\n1,2.0\n")
    measured = log_files.measure_logs(tmp_path)
    events.write_bytes(b"12345678")
    other.write_bytes(b"123456")
    (events.parent / "events.out.tfevents.2").write_bytes(b"1")
    (events.parent / "hparams.yaml").touch()
    (tmp_path / "metrics.csv").write_text("step,loss,dice\n0,1.0,\n1,2.0,\n2,3.0,0.5\n3,0.")
    log_files.rewind_logs(tmp_path, measured)
    assert events.read_bytes() == b"12345"
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,dice\n0,1.0,\n1,2.0,\n"
    assert sorted(path.name for path in events.parent.iterdir()) == [events.name, "hparams.yaml"]
    log_files.rewind_logs(tmp_path, {})
    assert not events.exists() and not (tmp_path / "metrics.csv").exists()
    assert other.read_bytes() == b"123456"
