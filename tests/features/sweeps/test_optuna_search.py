"""`hydra/sweeper=optuna`: searches that are stopped and resumed, and their search spaces."""

import csv
import json
import math
import os
import shutil
import signal
import sys

import pytest
from helpers import configs, tiny
from helpers.processes import FORKED, Forked
from helpers.stopped import stopped
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from medconv.config import ConfigError, conf_dir, data_of
from medconv.config.compose import Composed
from medconv.features.sweeps import optuna_search, run
from medconv.features.sweeps.job import Job
from medconv.features.sweeps.search_space import SearchSpace
from medconv.targets.scores import DICE, MonitoredMetric
from medconv.utils.exit_codes import DONE, PREEMPTED, USER

optuna = pytest.importorskip("optuna")
SPACE = "# @package hydra.sweeper\nn_trials: 2\nparams:\n  optimizer.lr: tag(log,interval(1e-3,1e-2))\n"


@pytest.fixture
def space(tmp_path):
    """A user's own search space, and the options that name it."""
    (tmp_path / "own/hparams_search").mkdir(parents=True)
    (tmp_path / "own/hparams_search/mine.yaml").write_text(SPACE)
    return [
        "-m",
        "--config-dir",
        str(tmp_path / "own"),
        "hydra/sweeper=optuna",
        "hparams_search=mine",
        "run.name=search",
    ]


def test_a_stopped_search_resumes_with_the_unfinished_trial(dataset, tmp_path, space, monkeypatch):
    monkeypatch.setattr(run, "subprocess", FORKED)
    stop = stopped(tmp_path / "stopped", number=signal.SIGTERM, to_parent=True)
    choice = "model.norm=choice(batch,instance)"
    arguments = [*space, *tiny.overrides(dataset), stop, choice]
    home = tmp_path / "runs/search"
    code, output = Forked(*arguments, cwd=tmp_path).wait()
    assert code == PREEMPTED, output
    first_title = output[output.index("[trial 1]") :].splitlines()[0]
    code, output = Forked(*arguments, cwd=tmp_path).wait()
    assert code == DONE, output
    assert (
        f"\n{first_title}\n" in output and output.count("\n[trial 2]") == 1 and "[trial 3]" not in output
    ), output  # the same trial again
    with (home / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    study = optuna.load_study(study_name="medconv", storage=storage(home))
    scores = {trial.params["optimizer.lr"]: trial.value for trial in study.trials}
    assert {float(row["optimizer.lr"]): float(row["val/dice"]) for row in rows} == scores
    assert len(scores) == 2 and all(1e-3 <= rate <= 1e-2 for rate in scores)
    assert [row["val/dice"] for row in rows] == sorted((row["val/dice"] for row in rows), reverse=True)
    code, output = Forked(*arguments, cwd=tmp_path).wait()  # nothing left to try
    assert code == DONE and "[trial" not in output and "sweep, best first" in output


@pytest.mark.parametrize(
    ("code", "score", "state"),
    [(0, 0.5, "COMPLETE"), (0, None, "FAIL"), (0, math.nan, "FAIL"), (1, 0.5, "FAIL"), (-9, None, "FAIL")],
)
def test_optuna_is_told_the_result_of_a_trial(code, score, state, tmp_path):
    settings = {"n_trials": 3, "n_jobs": 2, "seed": 0}
    study = optuna_search._study(tmp_path, settings, DICE, optuna)
    space = SearchSpace({"seed": optuna.distributions.IntDistribution(0, 9)}, ["a=1"])
    trials = optuna_search._next(study, space, settings, optuna)
    assert [trial.user_attrs["overrides"][0] for trial in trials] == ["a=1", "a=1"]
    job = Job(tuple(trials[0].user_attrs["overrides"]), (), tmp_path, code)
    job.folder.path.mkdir()
    (job.folder.path / "summary.json").write_text(json.dumps({"val/dice": score}))
    again = optuna_search._study(tmp_path, settings, DICE, optuna)  # as after a kill
    assert [t.params for t in optuna_search._next(again, space, settings, optuna)] == [
        t.params for t in trials
    ]
    optuna_search._tell(again, trials[0], job, optuna)
    (finished,) = [trial for trial in again.trials if trial.state.is_finished()]
    assert (finished.state.name, finished.value, finished.user_attrs["exit_code"]) == (
        state,
        score if state == "COMPLETE" else None,
        code,
    )
    assert [t.number for t in optuna_search._next(again, space, settings, optuna)] == [1]


def test_a_search_for_the_lowest_error_has_the_lowest_as_its_best_and_ends_after_its_trials(tmp_path):
    settings = {"n_trials": 3, "n_jobs": 2, "seed": 0}
    mae = MonitoredMetric("val/mae", "mean absolute error", higher_is_better=False)
    study = optuna_search._study(tmp_path, settings, mae, optuna)
    space = SearchSpace({"seed": optuna.distributions.IntDistribution(0, 9)}, [])
    counts = []
    for _ in range(3):
        trials = optuna_search._next(study, space, settings, optuna)
        counts.append(len(trials))
        for trial in trials:
            study.tell(trial.number, float(trial.number + 1))
    assert counts == [2, 1, 0]
    assert study.best_value == 1


def storage(home):
    return optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(home / optuna_search.STUDY))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run.name=x"],
            "hydra/sweeper=optuna has no search space: give hparams_search=NAME, or KEY=choice(A,B)",
        ),
        (
            ["hparams_search=recipe", "hydra/sweeper=basic"],
            "hparams_search=NAME is a search space for Optuna: add hydra/sweeper=optuna",
        ),
        (["seed=interval(2,1)"], "hydra/sweeper=optuna: seed=interval(2,1): "),
        (
            ["seed=1,2", "hydra.sweeper.n_trials=0"],
            "hydra.sweeper.n_trials must be a whole number of 1 or more, got 0",
        ),
        (
            ["optimizer.lr=interval(0,1)", "data.bach_size=2"],
            "there is no key data.bach_size; did you mean data.batch_size",
        ),
        (
            ["data.fold=0,1"],
            "hydra/sweeper=optuna: data.fold in the space would find the easiest fold; search on one",
        ),
        (
            ["seed=1,2", "data.fold=all"],
            "hydra/sweeper=optuna: data.fold=all leaves no cases to validate, and no score",
        ),
    ],
)
def test_an_unusable_search_is_refused_with_the_reason(arguments, message, tmp_path):
    code, output = Forked("-m", "hydra/sweeper=optuna", *arguments, cwd=tmp_path).wait()
    assert code == USER and f"error: {message}" in output and "Traceback" not in output, output
    assert not list(tmp_path.glob("runs/*/*.journal"))  # which a corrected command would resume


def test_a_misspelt_key_in_a_search_with_own_options_is_refused(tmp_path, space):
    code, output = Forked(*space, "data.bach_size=2", cwd=tmp_path).wait()
    assert code == USER and "error: there is no key data.bach_size; did you mean data.batch_size" in output, (
        output
    )


def test_a_dry_run_prints_the_space_and_runs_nothing(dataset, tmp_path, space):
    own = [f"data.root={dataset}", "data=msd", "model.norm=batch,instance", "run.dry_run=true"]
    code, output = Forked(*space, *own, cwd=tmp_path).wait()
    assert code == DONE, output
    assert output.splitlines() == [
        "2 trials by Optuna for the best val/dice, into runs/search, over",
        "  optimizer.lr=tag(log,interval(1e-3,1e-2))",
        "  model.norm=batch,instance",
    ]
    assert not (tmp_path / "runs/search").exists()


def test_without_optuna_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        ValueError, match="hydra/sweeper=optuna needs the package optuna: pip install 'medconv\\[optuna\\]'"
    ):
        optuna_search.run(["seed=1,2"], {}, lambda overrides: None)


def test_a_resumed_search_proposes_new_values(tmp_path):
    settings, rates = {"n_trials": 3, "n_jobs": 1, "seed": 0}, []
    space = SearchSpace({"lr": optuna.distributions.FloatDistribution(0, 1)}, [])
    for _ in range(3):
        study = optuna_search._study(tmp_path, settings, DICE, optuna)
        (trial,) = optuna_search._next(study, space, settings, optuna)
        study.tell(trial.number, 0.5)
        rates.append(trial.params["lr"])
    assert len(set(rates)) == 3


def composed(folder, overrides):
    """The config as Hydra composes it; a kernel size for a model without one does not compose."""
    if "misspelt=1" in overrides or (
        "model=monai_unet" in overrides and any(o.startswith("model.kernel_size=") for o in overrides)
    ):
        key = "misspelt" if "misspelt=1" in overrides else "model.kernel_size"
        raise ConfigCompositionException(f"Could not override '{key}'")
    settings = {"launcher": {}, "runtime": {"config_sources": []}, "job": {"config_name": "train"}}
    commands = {"overrides": {"task": overrides, "hydra": []}}
    run = {"dir": str(folder), "name": None, "dry_run": False}
    cases = [{"_target_": "medconv.data.case.Case", "id": name, "images": []} for name in "abcde"]
    names = {"name": "boxes", "class_names": ["background", "box"], "modalities": ["MRI"]}
    layout = {"_target_": "medconv.data.case.Dataset", "cases": cases, **names}
    data = OmegaConf.merge(OmegaConf.load(conf_dir() / "data/base.yaml"), {"layout": layout})
    values = OmegaConf.create({"run": run, "data": data})
    return Composed(values, OmegaConf.create({**settings, **commands}), choices={})


WELL = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
with (folder / "count").open("a") as file: file.write("x")
(folder / "summary.json").write_text(json.dumps({"val/dice": 0.5}))
"""
LOST = WELL + '(folder / "error.txt").write_text("another process is gone"); sys.exit(75)'


def searched(folder, monkeypatch, *arguments, line=WELL, trials=4, n_jobs=1):
    """A search whose jobs run a line of Python, with their folder as argument, in place of training."""
    command = property(lambda job: [sys.executable, "-c", line, str(job.folder.path)])
    monkeypatch.setattr(Job, "command", command)
    settings = {"n_trials": trials, "n_jobs": n_jobs, "seed": 0}
    return optuna_search.run(arguments, settings, lambda overrides: composed(folder, overrides))


def states(folder):
    return [
        trial.state.name for trial in optuna.load_study(study_name="medconv", storage=storage(folder)).trials
    ]


def test_a_trial_that_does_not_compose_fails_and_the_search_continues(tmp_path, monkeypatch, capsys):
    space = ["model=choice(monai_unet,customconv)", "model.kernel_size=range(3,8,2)"]
    assert searched(tmp_path, monkeypatch, *space, trials=8) == DONE
    output = capsys.readouterr().out
    assert set(states(tmp_path)) == {"COMPLETE", "FAIL"} and len(states(tmp_path)) == 8
    assert output.count("does not compose: Could not override 'model.kernel_size'") == states(tmp_path).count(
        "FAIL"
    )
    assert "model=monai_unet" not in output[output.index("sweep, best first") :]
    with pytest.raises(ConfigCompositionException, match="misspelt"):  # in every trial: nothing is kept
        searched(tmp_path / "other", monkeypatch, *space, "misspelt=1")
    assert not (tmp_path / "other").exists()


def test_a_trial_that_lost_a_process_is_tried_twice(tmp_path, monkeypatch, capsys):
    assert searched(tmp_path, monkeypatch, "seed=range(0,9)", line=LOST, trials=2) == PREEMPTED
    assert states(tmp_path) == ["FAIL", "FAIL"]
    output = capsys.readouterr().out
    assert output.count("[trial 1]") == output.count("[trial 2]") == 2
    assert "exit code 75: another process is gone" in output


def test_equal_trials_at_the_same_time_are_one_run(tmp_path, monkeypatch):
    assert searched(tmp_path, monkeypatch, "seed=choice(0,1)", n_jobs=4) == DONE
    assert states(tmp_path) == ["COMPLETE"] * 4
    assert len(list(tmp_path.glob("*/count"))) <= 2 and {p.read_text() for p in tmp_path.glob("*/count")} == {
        "x"
    }


def test_one_folder_holds_one_search(tmp_path, monkeypatch):
    begun = ["seed=choice(0,1)", "optimizer.lr=1e-3", "data.num_workers=2"]
    searched(tmp_path, monkeypatch, *begun, trials=1)
    searched(
        tmp_path, monkeypatch, begun[1], begun[0], "data.num_workers=4", trials=2
    )  # does not change what is trained
    assert len(states(tmp_path)) == 2
    for other, message in (
        (["seed=choice(0,1)", "optimizer.lr=1e-2"], "optimizer.lr: 1e-3 before, 1e-2 now"),
        (["seed=choice(0,1)"], "optimizer.lr: 1e-3 before, nothing now"),
        ([*begun, "optimizer.lr=interval(0,1)"], "optimizer.lr: 1e-3 before, FloatDistribution"),
        ([*begun, "seed=interval(0,9)"], "seed: CategoricalDistribution.* before, FloatDistribution"),
        ([*begun, "model=a,b"], "model: nothing before, CategoricalDistribution"),
    ):
        with pytest.raises(
            ConfigError, match=f"^{tmp_path} holds another search; choose another run.name\n.*{message}"
        ):
            searched(tmp_path, monkeypatch, *other)
    assert len(states(tmp_path)) == 2


def test_files_that_change_between_two_starts_are_warned_of(dataset, tmp_path, caplog):
    data = data_of(configs.composed(*tiny.overrides(shutil.copytree(dataset, tmp_path / "data"))))
    study = optuna_search._study(tmp_path, {"n_jobs": 1, "seed": 0}, DICE, optuna)
    for _ in range(2):
        optuna_search._warn_of_changed_files(study, data)
    assert "have changed" not in caplog.text
    os.utime(tmp_path / "data/labelsTr/case_1.nii.gz", (1, 1))
    optuna_search._warn_of_changed_files(study, data)
    assert "files of the dataset have changed since this search began" in caplog.text


def test_a_search_under_torchrun_is_refused(monkeypatch):
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(
        ConfigError,
        match="-m starts a sweep, and its jobs start their own processes; run it without torchrun",
    ):
        optuna_search.run(["seed=1,2"], {}, lambda overrides: None)


def test_a_study_with_a_cut_last_line_resumes_a_damaged_one_is_refused(tmp_path, monkeypatch):
    path = tmp_path / optuna_search.STUDY
    searched(tmp_path, monkeypatch, "seed=range(0,9)", trials=1)
    with path.open("a") as file:
        file.write('{"op_code": 4, "worker')
    searched(tmp_path, monkeypatch, "seed=range(0,9)", trials=2)
    assert states(tmp_path) == ["COMPLETE"] * 2  # later lines can be read too
    path.write_text(path.read_text().replace('{"op_code', '{"op', 1).replace('"op_code', "op_code", 1))
    with pytest.raises(ConfigError, match=f"^{path}: damaged \\(.*another run.name begins a new search"):
        searched(tmp_path, monkeypatch, "seed=range(0,9)", trials=3)
