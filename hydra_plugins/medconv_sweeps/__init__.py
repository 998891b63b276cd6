"""Hydra plugins, found by Hydra in this namespace: `hydra/launcher=slurm` and `hydra/sweeper=optuna`.

Every Hydra program in this environment imports this file, so it imports medconv only when it is used.
"""

from __future__ import annotations

import sys
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class Slurm(BasicLauncher):
    """Composes the jobs like Hydra's own launcher; medconv/sweeps submits them once all have composed."""

    submits_an_array = True

    def __init__(self, **settings: Any) -> None:
        super().__init__()


class Optuna(Sweeper):
    """Searches with Optuna; the work is in medconv/sweeps/optuna_search.py."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context = hydra_context
        self.config = config

    def sweep(self, arguments: list[str]) -> None:
        from medconv.sweeps import optuna_search

        def compose(overrides: list[str]) -> DictConfig:
            return self.context.config_loader.load_sweep_config(self.config, overrides)

        code = optuna_search.run(arguments, self.settings, compose)
        if code:
            sys.exit(code)
