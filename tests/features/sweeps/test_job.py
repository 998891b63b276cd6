"""medconv/features/sweeps/job.py: the folder, arguments and failures of a job."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from medconv.config import ConfigError, compose
from medconv.features.sweeps import job, run_job
from medconv.features.sweeps.job import Job
from medconv.utils.exit_codes import USER


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
