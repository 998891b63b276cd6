"""`hydra/sweeper=optuna`: Optuna chooses the next jobs of a sweep, for the best monitored metric.

The study is in the sweep's folder, so the same command resumes a search that was stopped: first the trials
that were running.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from medconv.config import ConfigError, DataConfig, data_of, validate
from medconv.features.sweeps import run as sweeps_run
from medconv.features.sweeps.job import Job, home, key
from medconv.features.sweeps.search_space import (
    COMPOSE_ERRORS,
    Compose,
    SearchSpace,
    chosen,
    first_config,
    parsed,
    search_space,
)
from medconv.targets.scores import MonitoredMetric, metric_of_summary
from medconv.training.checks import check_config
from medconv.training.data_setup import files_state, find_data
from medconv.training.identity import FREE
from medconv.training.run_dir import short_hash
from medconv.utils.exit_codes import DONE, PREEMPTED
from medconv.utils.logging import message, shown
from medconv.utils.optional_imports import needed

STUDY = "optuna.journal"
# Attributes of a trial.
_OVERRIDES = "overrides"
_CODE = "exit_code"
_LOST = "lost"  # a process of its job was lost
# Attributes of the study.
_SETTINGS = "settings"
_FILES = "files"  # a hash of the state of the dataset's files

log = logging.getLogger(__name__)


def run(
    arguments: Sequence[str], settings: Mapping[str, Any], compose: Compose, typed: Sequence[str] = ()
) -> int:
    """Search, print and write the table. Returns: the exit code.

    Args:
        arguments: overrides; those with several values are part of the search space.
        typed: all overrides of the command line, also those of Hydra's own settings.
        settings: of `conf/hydra/sweeper/optuna.yaml`.

    Raises:
        ConfigError: no Optuna, no space, or not that of an earlier start.
        Exception: errors of `sweeps.run.run`.
    """
    optuna = _optuna()
    sweeps_run.check_no_launcher()
    _check_settings(settings)
    params = [f"{name}={values}" for name, values in (settings.get("params") or {}).items()]
    overrides = parsed([*params, *arguments])
    space = search_space(overrides, optuna)
    composed = first_config(space, compose, optuna)
    folder = home(composed.values, typed)
    monitored = find_data(data_of(composed.values)).targets.monitored
    if composed.values.run.dry_run:
        check_config(validate(composed.values))
        print(f"{settings['n_trials']} trials by Optuna for the best {monitored.name}, into {folder}, over")
        print("\n".join(f"  {o.input_line}" for o in overrides if o.is_sweep_override()))
        return DONE
    study = _study(folder, settings, monitored, optuna)
    _check_same_search(study, folder, space)
    _warn_of_changed_files(study, data_of(composed.values))
    launcher: Any = OmegaConf.to_container(composed.settings.launcher, resolve=True)
    make_job = partial(_job, compose=compose, typed=typed)
    _search(study, space, settings, launcher, make_job, optuna)
    ended_trials = [trial for trial in study.get_trials() if _CODE in trial.user_attrs]
    return sweeps_run.finish([make_job(trial) for trial in ended_trials])


def _search(
    study: Any,
    space: SearchSpace,
    settings: Mapping[str, Any],
    launcher: Mapping[str, Any],
    make_job: Callable[[Any], Job],
    optuna: Any,
) -> None:
    keys = [key(name) for name in space.distributions]
    while True:
        # Anew in each round: Optuna chooses by the results so far.
        trials = _next(study, space, settings, optuna)
        if not trials:
            return
        jobs = _jobs(study, trials, make_job, optuna)
        if jobs:
            # Optuna counts trials from 0.
            numbers = [number + 1 for number in jobs]
            sweeps_run.run(list(jobs.values()), launcher, keys, numbers)
        for trial in trials:
            if trial.number in jobs:
                _tell(study, trial, jobs[trial.number], optuna)


def _check_same_search(study: Any, folder: Path, space: SearchSpace) -> None:
    """Raises: ConfigError: the study has another space, or other settings that change what is trained."""
    settings = {}
    for override in space.fixed:
        if not f"{key(override)}.".startswith(FREE):
            settings[key(override)] = override.partition("=")[2]
    for name, distribution in space.distributions.items():
        settings[name] = str(distribution)
    earlier = study.user_attrs.get(_SETTINGS)
    if earlier is None:
        study.set_user_attr(_SETTINGS, settings)
        return
    if earlier == settings:
        return
    lines = [f"{folder} holds another search; choose another run.name"]
    for name in sorted({*earlier, *settings}):
        before = earlier.get(name, "nothing")
        now = settings.get(name, "nothing")
        if before != now:
            lines.append(f"  {name}: {before} before, {now} now")
    raise ConfigError("\n".join(lines))


def _warn_of_changed_files(study: Any, data: DataConfig) -> None:
    """Finished trials are not run again, so that nothing else compares their data with that of new ones."""
    state = short_hash(files_state(data))
    if study.user_attrs.get(_FILES, state) != state:
        log.warning(
            "files of the dataset have changed since this search began; if images, labels or the split have, "
            "earlier trials cannot be compared with new ones: another run.name begins a new search"
        )
    study.set_user_attr(_FILES, state)


def _next(study: Any, space: SearchSpace, settings: Mapping[str, Any], optuna: Any) -> list[Any]:
    """The next trials: those that an earlier start left unfinished, else new ones."""
    trials = [trial for trial in study.get_trials() if _OVERRIDES in trial.user_attrs]
    unfinished = [trial for trial in trials if trial.state == optuna.trial.TrialState.RUNNING]
    if unfinished:
        return unfinished[: settings["n_jobs"]]
    ended = sum(trial.state.is_finished() for trial in trials)
    new_trials = []
    for _ in range(min(settings["n_jobs"], settings["n_trials"] - ended)):
        trial = study.ask(dict(space.distributions))
        trial.set_user_attr(_OVERRIDES, space.overrides(trial))
        new_trials.append(trial)
    return new_trials


def _jobs(study: Any, trials: Sequence[Any], make_job: Callable[[Any], Job], optuna: Any) -> dict[int, Job]:
    """Trial number to job. Trials whose values do not compose have failed."""
    jobs = {}
    for trial in trials:
        try:
            jobs[trial.number] = make_job(trial)
        except COMPOSE_ERRORS as error:
            values = " ".join(chosen(trial.params))
            reason = shown(f"{values}: does not compose: {message(error)}")
            print(f"\n[trial {trial.number + 1}] {reason}", flush=True)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return jobs


def _tell(study: Any, trial: Any, job: Job, optuna: Any) -> None:
    """Tell Optuna the result of a trial; a trial that lost one of its processes is tried a second time."""
    if job.code == PREEMPTED and _LOST not in trial.user_attrs:
        study._storage.set_trial_user_attr(trial._trial_id, _LOST, True)
        return
    summary = job.folder.summary()
    score = summary.get(metric_of_summary(summary).name)
    # By the storage: a trial of an earlier start cannot be changed by its public interface.
    study._storage.set_trial_user_attr(trial._trial_id, _CODE, job.code)
    if job.code == 0 and score is not None and math.isfinite(score):
        study.tell(trial.number, score)
    else:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def _job(trial: Any, compose: Compose, typed: Sequence[str]) -> Job:
    job = Job.of(compose(list(trial.user_attrs[_OVERRIDES])), typed)
    job.code = trial.user_attrs.get(_CODE)
    return job


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name in ("n_trials", "n_jobs"):
        setting = settings.get(name)
        if type(setting) is not int or setting < 1:
            raise ConfigError(f"hydra.sweeper.{name} must be a whole number of 1 or more, got {setting}")


def _study(folder: Path, settings: Mapping[str, Any], monitored: MonitoredMetric, optuna: Any) -> Any:
    """Raises: ConfigError: a damaged file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    _cut_unfinished_line(path)
    storages = optuna.storages
    try:
        study = optuna.create_study(
            storage=storages.JournalStorage(storages.journal.JournalFileBackend(str(path))),
            study_name="medconv",
            direction="maximize" if monitored.higher_is_better else "minimize",
            load_if_exists=True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: damaged ({error}); another run.name begins a new search") from error
    # Another seed for each start: the same seed would propose the same trials again.
    seed = settings["seed"] + len(study.get_trials())
    # Running trials count as bad ones, so that those of one batch differ.
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return study


def _cut_unfinished_line(path: Path) -> None:
    """Remove the last line if a process was killed while writing it: it would spoil the next line."""
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _optuna() -> Any:
    """Raises: ValueError: it is not installed."""
    optuna = needed("optuna", "optuna", "hydra/sweeper=optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
