"""From a command line to a config: what `train` and `prepare` share of Hydra."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from medconv import config


def composed(job: Callable[[DictConfig, Any], None]) -> None:
    """Call `job` with the config that the command line means and Hydra's own settings; in a sweep, once for each.

    Not at all where the command line only asks Hydra a question, such as `--cfg job`.
    Raises: ConfigError: a key that does not exist. What Hydra and `job` raise.
    """

    @hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="train")
    def one(found: DictConfig) -> None:
        job(found, HydraConfig.get())

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing, so that `commands.guard` sees every error
    try:
        one()
    except ConfigCompositionException as error:
        raise _explained(error) from error


def _explained(error: ConfigCompositionException) -> Exception:
    """A key that does not exist, with the nearest ones that do; any other error as it is."""
    if "'BasicSweeperConf'" in str(error):
        return config.ConfigError("sweep=NAME is a search space for Optuna: add hydra/sweeper=optuna")
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown is None:
        return error
    chosen = [o for o in sys.argv[1:] if re.match(r"[\w/]+=[\w-]+$", o)]
    groups = [o for o in chosen if (config.conf_dir() / f"{o.replace('=', '/')}.yaml").is_file()]  # none of the user's own
    with hydra.initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        known = list(config.keys(OmegaConf.to_container(hydra.compose("train", groups), resolve=False)))
    near = difflib.get_close_matches(unknown[1], known, n=3, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; +{unknown[1]}=... adds a key"
    return config.ConfigError(f"there is no key {unknown[1]}{hint}")
