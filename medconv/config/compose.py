"""From a command line to a config: what `train` and `preprocess` share of Hydra."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from medconv import config


def composed(job: Callable[[DictConfig, Any], None], arguments: Sequence[str]) -> None:
    """Call `job` with the config that these arguments mean and Hydra's own settings; in a sweep, once for
    each.

    Not at all where they only ask Hydra a question, such as `--cfg job`.
    Raises: ConfigError: a key that does not exist. What Hydra and `job` raise.
    """

    @hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="train")
    def one(composed_config: DictConfig) -> None:
        settings = HydraConfig.get()
        if settings.mode == RunMode.RUN:
            sys.argv[:] = whole  # by which Lightning starts the run's other processes
        job(composed_config, settings)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing, so that `guard` sees every error
    whole = sys.argv[:]
    try:
        sys.argv[1:] = arguments  # Hydra reads them there, and knows of no subcommands
        one()
    except ConfigCompositionException as error:
        raise _explained(error, arguments) from error
    finally:
        sys.argv[:] = whole


def hydra_flags(arguments: Sequence[str], command: str) -> argparse.Namespace:
    """What Hydra's own parser makes of the arguments. Raises: SystemExit: they are no flags of Hydra's."""
    parser = get_args_parser()
    parser.prog = command
    return parser.parse_args(arguments)


def only_shows(flags: argparse.Namespace) -> bool:
    """Whether Hydra answers by itself, such as for `--cfg job`, and runs nothing."""
    return bool(flags.cfg or flags.info or flags.hydra_help or flags.shell_completion)


def _explained(error: ConfigCompositionException, arguments: Sequence[str]) -> Exception:
    """A key that does not exist, with the nearest ones that do; any other error as it is."""
    if "'BasicSweeperConf'" in str(error):
        return config.ConfigError("sweep=NAME is a search space for Optuna: add hydra/sweeper=optuna")
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown is None:
        return error
    chosen = [o for o in arguments if re.match(r"[\w/]+=[\w-]+$", o)]
    groups = [
        o for o in chosen if (config.conf_dir() / f"{o.replace('=', '/')}.yaml").is_file()
    ]  # none of the user's own
    with hydra.initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        keys = list(config.keys(OmegaConf.to_container(hydra.compose("train", groups), resolve=False)))
    near = difflib.get_close_matches(unknown[1], keys, n=3, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; +{unknown[1]}=... adds a key"
    return config.ConfigError(f"there is no key {unknown[1]}{hint}")
