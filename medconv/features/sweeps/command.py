"""`medconv sweep`, `medconv train -m`: compose all configs of a sweep, then run them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from medconv.cli.parsers import Parser, add_package
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

if TYPE_CHECKING:
    from medconv.config.compose import Composer

_OPTUNA = "medconv.features.sweeps.optuna_search.run"  # as conf/hydra/sweeper/optuna.yaml names it


def parser() -> Parser:
    command = Parser(
        "sweep",
        "model=customconv,segresnet optimizer.lr=1e-3,3e-3 data=msd data.root=/data/Task04",
        "Train once for each combination of KEY=A,B; the same as medconv train -m.",
        takes_overrides=True,
    )
    add_package(command.general())
    return command


def run_command(options: argparse.Namespace) -> int:
    """Run the sweep, or only show what Hydra is asked for. Returns: the exit code."""
    from medconv.config import compose

    start_logging()
    flags = compose.hydra_flags(options.overrides, "medconv sweep", options.package)
    if flags.only_shows:
        from medconv.cli.show import show

        show(flags)
        return DONE
    flags.multirun = True
    return _run(compose.Composer(flags))


def _run(composer: Composer) -> int:
    from omegaconf import OmegaConf

    from medconv.config import validate
    from medconv.features.sweeps import optuna_search
    from medconv.features.sweeps import run as sweeps_run
    from medconv.features.sweeps.job import Job
    from medconv.training.checks import check_config

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
        for each in composed:
            check_config(validate(each.values))
        print(sweeps_run.plan(jobs, launcher))
        return DONE
    sweeps_run.run(jobs, launcher)
    return sweeps_run.finish(jobs)
