"""medconv/sweeps/job.py: the folder, arguments and failures of a job."""

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from medconv.config import compose
from medconv.sweeps import job
from medconv.sweeps.job import Job
from medconv.utils import signals
from medconv.utils.cluster import PeerLostError


def test_only_a_failure_writes_an_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file distinguishes a job that lost a process from a stopped one; both end with 75."""
    monkeypatch.setenv("MEDCONV_SWEEP", "")
    sweep_job = Job(("a=1",), (), tmp_path)
    composed = OmegaConf.create({"run": {"dir": str(sweep_job.folder.path)}})
    job.note_failure(composed, signals.RunInterrupted())
    assert not sweep_job.has_error
    job.note_failure(composed, PeerLostError("another process is gone"))
    assert sweep_job.has_error and sweep_job.begin() is None and not sweep_job.has_error


def test_the_order_of_overrides_does_not_change_the_folder() -> None:
    first = Job(("a=1", "data.fold=0"), (), Path("runs/x"))
    assert first.folder.path == Job(("data.fold=0", "a=1"), (), Path("runs/x")).folder.path
    assert first.folder.path != Job(("a=1", "data.fold=1"), (), Path("runs/x")).folder.path


def test_a_job_has_its_interpolations_as_they_were_typed() -> None:
    found: list[Job] = []
    typed = ("run.name=fold${data.fold}", "model.strides=${derived.strides}")
    compose.run_with_config(lambda composed, settings: found.append(Job.of(composed, settings)), typed)
    assert found[0].overrides == typed


@pytest.mark.parametrize("name", ["it's", "a\\b", "a\\", "a\\'b", 'a "b"', "a b,c=[1]"])
def test_a_folder_with_special_characters_reaches_the_job(name: str) -> None:
    sweep_job = Job(("a=1",), (), Path(name))
    (argument,) = [word for word in sweep_job.arguments if word.startswith("run.dir=")]
    assert OverridesParser.create().parse_override(argument).value() == str(sweep_job.folder.path)


def test_tables_show_values_as_they_were_typed() -> None:
    """Hydra's sweeper writes a colon as `\\:`."""
    limited = Job((r"trainer.max_time=00\:20\:00\:00", r"x='a\:b'"), (), Path("runs/x"))
    assert job.settings_of(limited, ["trainer.max_time", "x"]) == r"trainer.max_time=00:20:00:00 x='a\:b'"


def test_a_sweep_without_a_name_is_named_by_what_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    def home(*arguments: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2", *arguments])
        return job.home(OmegaConf.create({"run": {"dir": None, "name": None}}))

    same = [
        "hydra/launcher=slurm",
        "hydra.launcher.time='01:00:00'",
        "data.fold=0,1",
        "hydra.sweeper.n_trials=3",
    ]
    assert {home(override) for override in same} == {home()}
    assert len({home(), home("hparams_search=recipe"), home("hparams_search=mine")}) == 3
