"""The work of `medconv train -m`: compose all configs of a sweep, then run them."""

from typing import Any

from omegaconf import OmegaConf

from medconv.config.compose import Composer
from medconv.features.sweeps import optuna_search
from medconv.features.sweeps import run as sweeps_run
from medconv.features.sweeps.job import Job
from medconv.utils.exit_codes import DONE

_OPTUNA = "medconv.features.sweeps.optuna_search.run"  # as conf/hydra/sweeper/optuna.yaml names it


def run_sweep(composer: Composer) -> int:
    """Run the sweep of a command line. Returns: the exit code."""
    settings = composer.sweep_settings
    if settings.sweeper.get("_target_") == _OPTUNA:
        sweeper: Any = OmegaConf.to_container(settings.sweeper, resolve=True)
        arguments: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        return optuna_search.run(arguments, sweeper, composer.job, composer.overrides)
    composed = composer.configs()  # all of them before the first run begins
    jobs = [Job.of(each, composer.overrides) for each in composed]
    sweeps_run.check_no_launcher()
    launcher: Any = OmegaConf.to_container(composed[-1].settings.launcher, resolve=True)
    if composed[-1].values.run.dry_run:
        print(sweeps_run.plan(jobs, launcher))
        return DONE
    sweeps_run.run(jobs, launcher)
    return sweeps_run.finish(jobs)
