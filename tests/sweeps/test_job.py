"""A job of a sweep: its folder, its arguments, and how a sweep without a name is called."""

import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from medconv.sweeps import job
from medconv.sweeps.job import Job
from medconv.utils import signals
from medconv.utils.cluster import PeerLostError


def test_only_a_failure_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this a sweep tells a job that lost a process from one that was stopped; both end with 75."""
    monkeypatch.setenv("MEDCONV_SWEEP", "")
    sweep_job = Job(("a=1",), (), tmp_path)
    composed = OmegaConf.create({"run": {"dir": str(sweep_job.folder.path)}})
    job.note_failure(composed, signals.RunInterrupted())
    assert not sweep_job.has_error
    job.note_failure(composed, PeerLostError("another process is gone"))
    assert sweep_job.has_error and sweep_job.begin() is None and not sweep_job.has_error


def test_a_job_has_its_folder_by_its_overrides_in_any_order() -> None:
    one = Job(("a=1", "data.fold=0"), (), Path("runs/x"))
    assert one.folder.path == Job(("data.fold=0", "a=1"), (), Path("runs/x")).folder.path
    assert one.folder.path != Job(("a=1", "data.fold=1"), (), Path("runs/x")).folder.path


@pytest.mark.parametrize("name", ["it's", "a\\b", "a\\", "a\\'b", 'a "b"', "a b,c=[1]"])
def test_a_folder_of_any_name_reaches_the_job(name: str) -> None:
    sweep_job = Job(("a=1",), (), Path(name))
    (given,) = [one for one in sweep_job.arguments if one.startswith("run.dir=")]
    assert OverridesParser.create().parse_override(given).value() == str(sweep_job.folder.path)


def test_a_sweep_without_a_name_has_one_by_what_it_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    def home(*arguments: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2", *arguments])
        return job.home(OmegaConf.create({"run": {"dir": None, "name": None}}))

    same = [
        "hydra/launcher=slurm",
        "hydra.launcher.time='01:00:00'",
        "data.fold=0,1",
        "hydra.sweeper.n_trials=3",
    ]
    assert {home(one) for one in same} == {home()}
    assert len({home(), home("hparams_search=recipe"), home("hparams_search=mine")}) == 3
