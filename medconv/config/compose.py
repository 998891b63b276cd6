"""From a command line to a config by Hydra; `train` and `preprocess` share it."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from medconv import config
from medconv.config.classes import search_folder
from medconv.config.composition_errors import check_hydra_settings, explained
from medconv.config.instantiate import iter_targets
from medconv.config.override_text import escaped
from medconv.config.replaced_classes import fit_classes
from medconv.config.unknown_keys import check_names

_FULL_ERROR = "HYDRA_FULL_ERROR"
_FILE_OF_SWEEPS = Path("runs/multirun.yaml")  # Hydra writes it; hydra.sweep.dir of conf/train.yaml
_FLAGS_OF_CFG_JOB = ("--cfg", "-c", "job", "--resolve", "--cfg=job", "-cjob")


def run_with_config(job: Callable[[DictConfig, Any], None], arguments: Sequence[str]) -> None:
    """Compose the config of these arguments and call `job` with it and Hydra's own settings.

    A sweep calls `job` once per combination. An argument that only asks Hydra for information, such as
    `--cfg hydra`, does not call it.
    Raises: ConfigError: a key that does not exist. Any error of Hydra or `job`.
    """

    @hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="train")
    def run_job(composed: DictConfig) -> None:
        settings = HydraConfig.get()
        modes.add(settings.mode)
        if settings.mode == RunMode.RUN:
            sys.argv[:] = full_argv  # Lightning starts the run's other processes with it
        try:
            _check_and_fit(composed, settings)
        except config.ConfigError as error:
            refused.append(error)  # Hydra would print a line of its own
            return
        job(composed, settings)

    refused: list[config.ConfigError] = []
    modes: set[RunMode | None] = set()
    check_hydra_settings(arguments)
    # Hydra then raises its errors instead of printing them; `guard` prints them.
    full_error = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    full_argv = sys.argv[:]
    try:
        sys.argv[1:] = map(escaped, arguments)  # Hydra reads the arguments there and knows no subcommands
        with _help_of_any_type():
            run_job()
    except ConfigCompositionException as error:
        raise explained(error, arguments) from error
    except OverrideParseException as error:
        how = "write KEY=VALUE, and a value with spaces, commas, brackets or other special characters as"
        raise config.ConfigError(f"cannot read {error.override}: {how} 'KEY=\"VALUE\"'") from error
    finally:
        sys.argv[:] = full_argv
        if RunMode.MULTIRUN in modes:
            _FILE_OF_SWEEPS.unlink(missing_ok=True)  # of one sweep, in the folder of all runs
        os.environ.pop(_FULL_ERROR)
        if full_error is not None:
            os.environ[_FULL_ERROR] = full_error
    if refused:
        raise refused[0]


def validated_configs(arguments: Sequence[str]) -> list[config.RunConfig]:
    """The config of these arguments, or those of a sweep.

    Raises: ConfigError: as `run_with_config` and `validate`.
    """
    composed: list[DictConfig] = []
    run_with_config(lambda each, _: composed.append(each), arguments)
    # Not by the job: Hydra would print a line of its own above an error.
    return [config.validate(each) for each in composed]


def _check_and_fit(composed: DictConfig, settings: Any) -> None:
    """Check the names of keys, and find the user's classes. Raises: ConfigError: as `check_names`."""
    values: Any = OmegaConf.to_container(composed, resolve=False)
    check_names(values)
    # before classes are imported, whether the command line or a YAML file names them
    for _, target in iter_targets(values, "config"):
        for folder in _folders_of_classes(settings):
            search_folder(target, folder)
    fit_classes(composed, settings)


def _folders_of_classes(settings: Any) -> list[Path]:
    """The current folder, and that of `--config-dir` with the one that holds it.

    A package `mine` may hold its options, so that `--config-dir mine` and `mine.net.Net` belong together.
    """
    folders = [Path.cwd()]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            folder = Path(source.path).absolute()
            folders += [folder, folder.parent]
    return folders


@contextmanager
def _help_of_any_type() -> Iterator[None]:
    """Python 3.14 refuses a help text that is not a string; Hydra's parser has one (1.3.8 and earlier)."""
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None:
        yield
        return

    def check_strings(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(parser, action)

    argparse.ArgumentParser._check_help = check_strings  # type: ignore[attr-defined]
    try:
        yield
    finally:
        argparse.ArgumentParser._check_help = check  # type: ignore[attr-defined]


def hydra_flags(arguments: Sequence[str], command: str) -> argparse.Namespace:
    """The arguments, parsed by Hydra's own parser. Raises: ConfigError: Hydra has no such flag."""
    with _help_of_any_type():
        parser = get_args_parser()
    try:
        parser.exit_on_error = False
        flags, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise config.ConfigError(f"{error}; flags: {command} --help") from error
    if unknown:
        problem = f"there is no flag {unknown[0]}"
        if not unknown[0].startswith("-"):
            problem = f"{unknown[0]} must stand beside the other keys"
        raise config.ConfigError(
            f"{problem}; keys are written as in trainer.max_steps=20, all before or all after flags; "
            f"flags: {command} --help"
        )
    return flags


def only_shows(flags: argparse.Namespace) -> bool:
    """Whether Hydra only prints information, such as for `--cfg job`, and runs nothing."""
    return bool(flags.cfg or flags.info or flags.hydra_help or flags.shell_completion)


def show(flags: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Print what Hydra is asked for; `--cfg job` prints what a run would get, or refuses it as a run would.

    Args: flags: as `hydra_flags` reads them from the arguments.
    Raises: as `run_with_config`.
    """
    # a package is a part of the config, and a sweep would begin
    if flags.cfg != "job" or flags.package or flags.multirun:
        run_with_config(lambda *_: None, arguments)
        return
    as_yaml = resolved if flags.resolve else OmegaConf.to_yaml
    # with the flag, Hydra would print the config itself and call no job, and so check nothing
    overrides = [argument for argument in arguments if argument not in _FLAGS_OF_CFG_JOB]
    run_with_config(lambda composed, _: print(as_yaml(composed), end=""), overrides)


def resolved(composed: DictConfig) -> str:
    """The config as YAML without interpolations; what only the data tells is named so."""
    from_data = {key.name: f"(from the data: {key.name})" for key in fields(config.Derived)}
    OmegaConf.set_struct(composed, False)
    filled = OmegaConf.merge(composed, {"derived": from_data})
    return OmegaConf.to_yaml(filled, resolve=True)
