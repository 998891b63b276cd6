"""`hydra/sweeper=optuna`: Optuna chooses what the next jobs of a sweep try, for the best validation Dice.

The study lies in the sweep's folder, so the same command goes on where it was stopped:
first with the trials that were running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from medconv import sweep
from medconv.config import ConfigError
from medconv.jobs import Job, home, key

STUDY = "optuna.journal"
Compose = Callable[[list[str]], DictConfig]
_OVERRIDES, _CODE = "overrides", "exit_code"  # what is noted of a trial


def run(arguments: Sequence[str], settings: Mapping[str, Any], compose: Compose) -> int:
    """Search, print and write the table. Returns: the exit code.

    Args: arguments: overrides; those with several values are part of the space. settings: `conf/hydra/sweeper/optuna.yaml`.
    Raises: ConfigError: no Optuna, no space, or one that does not fit an earlier start. What `sweep.run` raises.
    """
    optuna = _optuna()
    params = [f"{name}={given}" for name, given in (settings.get("params") or {}).items()]
    overrides = _parsed([*params, *arguments])
    fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
    space = {o.get_key_element(): _distribution(o, optuna) for o in overrides if o.is_sweep_override()}
    if not space:
        raise ConfigError("hydra/sweeper=optuna has no search space: give sweep=NAME, or KEY=choice(A,B)")
    composed = compose(fixed)
    launcher: Any = OmegaConf.to_container(composed.hydra.launcher)
    folder = home(composed)
    if composed.run.dry_run:
        print(f"{settings['n_trials']} trials by Optuna for the best val/dice, into {folder}, over")
        print("\n".join(f"  {o.input_line}" for o in overrides if o.is_sweep_override()))
        return 0
    study = _study(folder, settings, optuna)
    while trials := _next(study, space, fixed, settings, optuna):
        jobs = [_job(trial, compose) for trial in trials]
        sweep.run(jobs, launcher, keys=[key(name) for name in space], first=trials[0].number + 1)
        for trial, job in zip(trials, jobs, strict=True):
            _tell(study, trial, job, optuna)
    return sweep.finish([_job(trial, compose) for trial in study.get_trials() if _OVERRIDES in trial.user_attrs])


def _next(study: Any, space: Mapping[str, Any], fixed: list[str], settings: Mapping[str, Any], optuna: Any) -> list[Any]:
    """Trials to be run now: those that an earlier start left unfinished, else new ones."""
    left = [t for t in study.get_trials(states=[optuna.trial.TrialState.RUNNING]) if _OVERRIDES in t.user_attrs]
    if left:
        return left[: settings["n_jobs"]]
    ended = len([t for t in study.get_trials() if t.state.is_finished() and _OVERRIDES in t.user_attrs])
    trials = []
    for _ in range(min(settings["n_jobs"], settings["n_trials"] - ended)):
        try:
            trial = study.ask(dict(space))
        except ValueError as error:
            raise ConfigError(f"hydra/sweeper=optuna: {error}; a space that has changed needs another run.name") from error
        trial.set_user_attr(_OVERRIDES, [*fixed, *(f"{name}={value}" for name, value in trial.params.items())])
        trials.append(trial)
    return trials


def _tell(study: Any, trial: Any, job: Job, optuna: Any) -> None:
    score = job.folder.summary().get("val/dice")
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


def _study(folder: Path, settings: Mapping[str, Any], optuna: Any) -> Any:
    for name in ("n_trials", "n_jobs"):
        if type(settings.get(name)) is not int or settings[name] < 1:
            raise ConfigError(f"hydra.sweeper.{name} must be a whole number of 1 or more, got {settings.get(name)}")
    folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / STUDY))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="medconv", direction="maximize", load_if_exists=True)
    # another seed for each start: the same one would propose the same trials again
    study.sampler = optuna.samplers.TPESampler(seed=settings["seed"] + len(study.get_trials()))
    return study


def _parsed(arguments: Sequence[str]) -> list[Override]:
    """Of each key the last one, which counts."""
    parsed = OverridesParser.create().parse_overrides([a for a in arguments if key(a) != "sweep"])
    return list({override.get_key_element(): override for override in parsed}.values())


def _distribution(override: Override, optuna: Any) -> Any:
    """Of Hydra's choice, range and interval; whole numbers stay whole. Raises: ConfigError: an empty one."""
    found, kinds = override.value(), optuna.distributions
    try:
        if isinstance(found, IntervalSweep):
            whole = isinstance(found.start, int) and isinstance(found.end, int)
            kind = kinds.IntDistribution if whole else kinds.FloatDistribution
            return kind(found.start, found.end, log="log" in found.tags)
        if isinstance(found, RangeSweep) and not found.shuffle:
            return kinds.CategoricalDistribution(list(found.range()))
        return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"hydra/sweeper=optuna: {override.input_line}: {error}") from error


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError("hydra/sweeper=optuna needs the package optuna: pip install 'medconv[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
