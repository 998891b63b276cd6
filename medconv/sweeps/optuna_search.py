"""`hydra/sweeper=optuna`: Optuna chooses the next jobs of a sweep, for the best monitored metric.

The study is in the sweep's folder, so the same command resumes a search that was stopped: first the trials
that were running.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medconv.config import ConfigError, data_of
from medconv.sweeps import run as sweeps_run
from medconv.sweeps.job import Job, home, key
from medconv.targets import monitor
from medconv.training.data_setup import find_data
from medconv.training.run_dir import FREE
from medconv.utils.exit_codes import PREEMPTED
from medconv.utils.logging import message, shown

STUDY = "optuna.journal"
Compose = Callable[[list[str]], DictConfig]
_OVERRIDES, _CODE, _LOST = "overrides", "exit_code", "lost"  # attributes of a trial
_SETTINGS = "settings"  # attribute of the study
_NO_CONFIG = (HydraException, OmegaConfBaseException, ConfigError)
_MAX_TRIED = 10  # random points of the space: if none of them composes, the mistake is not in a combination


def run(arguments: Sequence[str], settings: Mapping[str, Any], compose: Compose) -> int:
    """Search, print and write the table. Returns: the exit code.

    Args:
        arguments: overrides; those with several values are part of the search space.
        settings: of `conf/hydra/sweeper/optuna.yaml`.
    Raises: ConfigError: no Optuna, no space, or not that of an earlier start. Errors of `sweeps.run.run`.
    """
    optuna = _optuna()
    sweeps_run.check_no_launcher()
    _check_settings(settings)
    params = [f"{name}={values}" for name, values in (settings.get("params") or {}).items()]
    overrides = _parsed([*params, *arguments])
    fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
    space = {o.get_key_element(): _distribution(o, optuna) for o in overrides if o.is_sweep_override()}
    if not space:
        raise ConfigError(
            "hydra/sweeper=optuna has no search space: give hparams_search=NAME, or KEY=choice(A,B)"
        )
    composed = _first_config(space, fixed, compose, optuna)
    launcher: Any = OmegaConf.to_container(composed.hydra.launcher, resolve=True)
    folder, monitored = home(composed), find_data(data_of(composed))[0].targets.monitored
    if composed.run.dry_run:
        print(f"{settings['n_trials']} trials by Optuna for the best {monitored.name}, into {folder}, over")
        print("\n".join(f"  {o.input_line}" for o in overrides if o.is_sweep_override()))
        return 0
    study = _study(folder, settings, monitored, optuna)
    _check_same_search(study, folder, fixed, space)
    while trials := _next(study, space, fixed, settings, optuna):
        jobs = _jobs(study, trials, compose, optuna)
        if jobs:
            numbers = [number + 1 for number in jobs]
            sweeps_run.run(list(jobs.values()), launcher, [key(name) for name in space], numbers)
        for trial in trials:
            if trial.number in jobs:
                _tell(study, trial, jobs[trial.number], optuna)
    ended = [trial for trial in study.get_trials() if _CODE in trial.user_attrs]
    return sweeps_run.finish([_job(trial, compose) for trial in ended])


def _first_config(space: Mapping[str, Any], fixed: list[str], compose: Compose, optuna: Any) -> DictConfig:
    """The first random point of the space that composes.

    Raises: the error of the last point, if none composes. ConfigError: the trials could not be compared.
    """
    if "data.fold" in space:
        fold = "data.fold in the space would find the easiest fold; search on one fold"
        raise ConfigError(f"hydra/sweeper=optuna: {fold}")
    samples = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    error: Exception | None = None
    for _ in range(_MAX_TRIED):
        try:
            composed = compose([*fixed, *_chosen(samples.ask(dict(space)).params)])
        except _NO_CONFIG as problem:
            error = problem
            continue
        if composed.data.fold == "all":
            fold = "data.fold=all leaves no cases to validate, and no score to compare"
            raise ConfigError(f"hydra/sweeper=optuna: {fold}")
        return composed
    assert error is not None
    raise error


def _check_same_search(study: Any, folder: Path, fixed: Sequence[str], space: Mapping[str, Any]) -> None:
    """Raises: ConfigError: the study has another space, or other settings that change what is trained."""
    now = {key(o): o.partition("=")[2] for o in fixed if not f"{key(o)}.".startswith(FREE)}
    now |= {name: str(distribution) for name, distribution in space.items()}
    before = study.user_attrs.get(_SETTINGS)
    if before is None:
        study.set_user_attr(_SETTINGS, now)
    elif before != now:
        pairs = [(k, before.get(k, "nothing"), now.get(k, "nothing")) for k in sorted({*before, *now})]
        lines = "".join(f"\n  {k}: {old} before, {new} now" for k, old, new in pairs if old != new)
        raise ConfigError(f"{folder} holds another search; choose another run.name{lines}")


def _next(
    study: Any, space: Mapping[str, Any], fixed: list[str], settings: Mapping[str, Any], optuna: Any
) -> list[Any]:
    """The next trials: those that an earlier start left unfinished, else new ones."""
    known = [t for t in study.get_trials() if _OVERRIDES in t.user_attrs]
    unfinished = [t for t in known if t.state == optuna.trial.TrialState.RUNNING]
    if unfinished:
        return unfinished[: settings["n_jobs"]]
    trials = []
    ended = sum(t.state.is_finished() for t in known)
    for _ in range(min(settings["n_jobs"], settings["n_trials"] - ended)):
        trial = study.ask(dict(space))
        trial.set_user_attr(_OVERRIDES, [*fixed, *_chosen(trial.params)])
        trials.append(trial)
    return trials


def _chosen(params: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in params.items()]


def _jobs(study: Any, trials: Sequence[Any], compose: Compose, optuna: Any) -> dict[int, Job]:
    """Trial number to job. Trials whose values do not compose have failed."""
    jobs = {}
    for trial in trials:
        try:
            jobs[trial.number] = _job(trial, compose)
        except _NO_CONFIG as error:
            reason = f"{' '.join(_chosen(trial.params))}: does not compose: {message(error)}"
            print(f"\n[trial {trial.number + 1}] {shown(reason)}", flush=True)
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return jobs


def _tell(study: Any, trial: Any, job: Job, optuna: Any) -> None:
    """Tell Optuna the result of a trial; a trial that lost one of its processes is tried a second time."""
    if job.code == PREEMPTED and _LOST not in trial.user_attrs:
        study._storage.set_trial_user_attr(trial._trial_id, _LOST, True)
        return
    summary = job.folder.summary()
    score = summary.get(monitor.metric_of_summary(summary).name)
    study._storage.set_trial_user_attr(trial._trial_id, _CODE, job.code)
    if job.code == 0 and score is not None and math.isfinite(score):
        study.tell(trial.number, score)
    else:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def _job(trial: Any, compose: Compose) -> Job:
    composed = compose(list(trial.user_attrs[_OVERRIDES]))
    job = Job.of(composed, composed.hydra)
    job.code = trial.user_attrs.get(_CODE)
    return job


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name in ("n_trials", "n_jobs"):
        if type(settings.get(name)) is not int or settings[name] < 1:
            what = f"a whole number of 1 or more, got {settings.get(name)}"
            raise ConfigError(f"hydra.sweeper.{name} must be {what}")


def _study(folder: Path, settings: Mapping[str, Any], monitored: monitor.MonitoredMetric, optuna: Any) -> Any:
    """Raises: ConfigError: a damaged file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    _cut_unfinished_line(path)
    storages, direction = optuna.storages, "maximize" if monitored.higher_is_better else "minimize"
    try:
        storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name="medconv", direction=direction, load_if_exists=True
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: damaged ({error}); another run.name begins a new search") from error
    # Another seed for each start: the same seed would propose the same trials again.
    seed = settings["seed"] + len(study.get_trials())
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return study


def _cut_unfinished_line(path: Path) -> None:
    """Remove the last line if a process was killed while writing it: it would spoil the next line."""
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _parsed(arguments: Sequence[str]) -> list[Override]:
    """The overrides without `hparams_search`; of each key only the last one, which counts."""
    parsed = OverridesParser.create().parse_overrides([a for a in arguments if key(a) != "hparams_search"])
    return list({override.get_key_element(): override for override in parsed}.values())


def _distribution(override: Override, optuna: Any) -> Any:
    """Hydra's choice, range or interval as an Optuna distribution. Raises: ConfigError: it is empty."""
    values, kinds = override.value(), optuna.distributions
    try:
        if isinstance(values, IntervalSweep):
            integers = isinstance(values.start, int) and isinstance(values.end, int)
            kind = kinds.IntDistribution if integers else kinds.FloatDistribution
            return kind(values.start, values.end, log="log" in values.tags)
        if isinstance(values, RangeSweep) and not values.shuffle:
            return kinds.CategoricalDistribution(list(values.range()))
        return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"hydra/sweeper=optuna: {override.input_line}: {error}") from error


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        install = "needs the package optuna: pip install 'medconv[optuna]'"
        raise ConfigError(f"hydra/sweeper=optuna {install}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
