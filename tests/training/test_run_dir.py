"""medconv/training/run_dir.py: summaries of a run, and where a run resumes."""

import pytest
import torch

from medconv.config.schema import RunConfig, RunSettings
from medconv.training.run_dir import RunDir
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
