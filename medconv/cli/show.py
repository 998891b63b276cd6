"""What `medconv train` prints without running anything, such as `--cfg job` and `--info`."""

import argparse
import os
from dataclasses import fields

from hydra import version
from hydra._internal.utils import _run_hydra, get_args_parser
from omegaconf import DictConfig, OmegaConf

from medconv import config
from medconv.config.compose import MAIN_CONFIG, Composer, escaped, explaining, help_of_any_type
from medconv.config.unknown_keys import check_hydra_settings

_FULL_ERROR = "HYDRA_FULL_ERROR"


def show(flags: argparse.Namespace) -> None:
    """Print what Hydra is asked for; `--cfg job` prints what a run would get, or refuses it as a run would.

    Raises: as `Composer`.
    """
    # a package is a part of the config
    if flags.cfg != "job" or flags.package or flags.multirun:
        _let_hydra_show(flags)
        return
    as_yaml = resolved if flags.resolve else OmegaConf.to_yaml
    for composed in Composer(flags).configs():
        print(as_yaml(composed.values), end="")


def _let_hydra_show(flags: argparse.Namespace) -> None:
    version.setbase("1.3")
    check_hydra_settings(flags.overrides)
    shown = argparse.Namespace(**{**vars(flags), "overrides": [escaped(each) for each in flags.overrides]})
    # Hydra then raises its errors instead of printing them; `guard` prints them.
    full_error = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        with explaining(flags.overrides), help_of_any_type():
            _run_hydra(shown, get_args_parser(), _run_nothing, str(config.conf_dir()), MAIN_CONFIG)
    finally:
        os.environ.pop(_FULL_ERROR)
        if full_error is not None:
            os.environ[_FULL_ERROR] = full_error


def _run_nothing(composed: DictConfig) -> None:
    """Hydra wants to know what it would run."""


def resolved(composed: DictConfig) -> str:
    """The config as YAML without interpolations; what only the data tells is named so."""
    from_data = {key.name: f"(from the data: {key.name})" for key in fields(config.Derived)}
    OmegaConf.set_struct(composed, False)
    filled = OmegaConf.merge(composed, {"derived": from_data})
    return OmegaConf.to_yaml(filled, resolve=True)
