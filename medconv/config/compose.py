"""From a command line to configs by Hydra: the config of a run, or those of a sweep."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log
from hydra.errors import ConfigCompositionException, OverrideParseException, SearchPathException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from medconv import config
from medconv.config.classes import add_package, search_folder
from medconv.config.composition_errors import check_hydra_settings, explained
from medconv.config.instantiate import iter_targets
from medconv.config.override_text import escaped
from medconv.config.replaced_classes import fit_classes
from medconv.config.unknown_keys import check_names

_MAIN_CONFIG = "train"
_FULL_ERROR = "HYDRA_FULL_ERROR"


@dataclass(frozen=True)
class Composed:
    """A composed config with its interpolations, which `config.validate` makes a `RunConfig`.

    Args:
        settings: Hydra's own, such as the overrides as they were typed.
    """

    values: DictConfig
    settings: Any

    @property
    def choices(self) -> dict[str, str]:
        """Group to option, such as `model` to `customconv`."""
        return dict(self.settings.runtime.choices)


class Composer:
    """Composes the configs of a command line, each when it is asked for.

    Errors are those of Hydra and OmegaConf, or a `ConfigError` that names the key or option and the nearest
    ones. `hydra.main` is not used: it calls a function with each config, and knows no subcommands.
    Args:
        flags: from `hydra_flags`.
    Attributes:
        overrides: as Hydra reads them; those of a sweep with all values.
        is_sweep: by `-m`, or by `hydra.mode` in a config of the user's own.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        version.setbase("1.3")
        check_hydra_settings(flags.overrides)
        self._typed = flags.overrides
        self.overrides = [escaped(override) for override in flags.overrides]
        self._config_name = flags.config_name or _MAIN_CONFIG
        folder = flags.config_path or str(config.conf_dir())
        search_path = create_automatic_config_search_path(__file__, None, folder)
        if flags.config_dir is not None:
            own = Path(flags.config_dir).absolute()
            if not own.is_dir():
                raise SearchPathException(f"Additional config directory '{own}' not found")
            search_path.prepend("command-line", f"file://{own}", SearchPathQuery(provider="schema"))
        self._hydra = Hydra("medconv", ConfigLoaderImpl(search_path))
        self.is_sweep = flags.multirun or self._mode() == RunMode.MULTIRUN

    def _mode(self) -> Any:
        """`hydra.mode`; None: not set, or the config has an error, which `run` raises."""
        return self._hydra.get_mode(self._config_name, self.overrides)

    def configs(self) -> list[Composed]:
        """The config of a run; of a sweep one for each combination of the overrides with several values."""
        if not self.is_sweep:
            with _explained(self._typed):
                return [_checked(self._load(RunMode.RUN))]
        settings = self.sweep_settings
        overrides = [f"{key}={values}" for key, values in (settings.sweeper.get("params") or {}).items()]
        task: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        overrides += task
        with _explained(self._typed):
            parser = OverridesParser.create(config_loader=self._hydra.config_loader)
            (combinations,) = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
        return [self.job(combination) for combination in combinations]

    @property
    def sweep_settings(self) -> Any:
        """Hydra's settings of the whole sweep, such as its launcher and the overrides with all values."""
        return self._sweep.hydra

    @cached_property
    def _sweep(self) -> DictConfig:
        with _explained(self._typed):
            return self._load(RunMode.MULTIRUN)

    def job(self, overrides: Sequence[str]) -> Composed:
        """The config of a job of the sweep. Args: overrides: without several values."""
        with _explained(self._typed):
            return _checked(self._hydra.config_loader.load_sweep_config(self._sweep, list(overrides)))

    def _load(self, mode: RunMode) -> DictConfig:
        overrides = [*self.overrides, f"hydra.mode={mode.name}"]
        composed = self._hydra.compose_config(self._config_name, overrides, mode, with_log_configuration=True)
        if composed.hydra.callbacks:
            raise config.ConfigError("hydra.callbacks has no effect: callbacks=NAME chooses Lightning's")
        return composed


def compose(arguments: Sequence[str]) -> list[Composed]:
    """The config of these arguments of `medconv train`, or those of a sweep. Raises: as `Composer`."""
    return Composer(hydra_flags(arguments, "medconv train")).configs()


def validated_configs(arguments: Sequence[str]) -> list[config.RunConfig]:
    """The same as `compose`, checked. Raises: ConfigError: as `Composer` and `validate`."""
    return [config.validate(composed.values) for composed in compose(arguments)]


@contextmanager
def _explained(arguments: Sequence[str]) -> Iterator[None]:
    """Inside, Hydra's errors name the nearest keys and options, or how a value is written."""
    try:
        yield
    except ConfigCompositionException as error:
        raise explained(error, arguments) from error
    except OverrideParseException as error:
        how = "write KEY=VALUE, and a value with spaces, commas, brackets or other special characters as"
        raise config.ConfigError(f"cannot read {error.override}: {how} 'KEY=\"VALUE\"'") from error


def _checked(whole: DictConfig) -> Composed:
    """Separate Hydra's settings, check the names of keys, and find the user's classes.

    Raises: ConfigError: as `check_names`.
    """
    settings = whole.hydra
    with read_write(settings), open_dict(settings):
        settings.runtime.output_dir = str(Path.cwd())  # the log files of hydra/job_logging=default are there
    configure_log(settings.job_logging, settings.verbose)
    values = deepcopy(whole)
    with read_write(values), open_dict(values):
        del values["hydra"]
    _fill_in_hydras(values, whole)
    plain: Any = OmegaConf.to_container(values, resolve=False)
    check_names(plain)
    for package in plain["run"].get("packages") or ():
        add_package(str(package), *_folders_of_classes(settings))
    # before classes are imported, whether the command line or a YAML file names them
    for _, target in iter_targets(plain, "config"):
        for folder in _folders_of_classes(settings):
            search_folder(target, folder)
    fit_classes(values, settings)
    return Composed(values, settings)


def _fill_in_hydras(values: DictConfig, whole: DictConfig) -> None:
    """Replace interpolations such as `${hydra:runtime.choices.model}`, which Hydra knows only now.

    Its settings are not left for later: Lightning would add overrides to the processes that it starts.
    """
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(whole)
    try:
        for key, value in config.flatten(OmegaConf.to_container(values, resolve=False)).items():
            if "${hydra:" in str(value):
                filled = OmegaConf.select(values, key)
                is_list = OmegaConf.is_config(filled)
                OmegaConf.update(
                    values, key, OmegaConf.to_container(filled, resolve=True) if is_list else filled
                )
    finally:
        HydraConfig.instance().cfg = before  # a program of the user's own may have Hydra's settings too


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


def hydra_flags(arguments: Sequence[str], command: str, packages: Sequence[str] = ()) -> argparse.Namespace:
    """The arguments, parsed by Hydra's own parser.

    Args:
        command: for messages.
        packages: those of `--package`, which become `run.packages`, so that a run remembers them.
    Raises: ConfigError: Hydra has no such flag.
    """
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
    if flags.experimental_rerun is not None:
        raise config.ConfigError("--experimental-rerun is refused: it would run what a pickle file says")
    if flags.resolve and not flags.cfg:
        raise config.ConfigError("--resolve is for --cfg job")
    if packages:
        flags.overrides.append(f"run.packages=[{','.join(packages)}]")
    return flags


def only_shows(flags: argparse.Namespace) -> bool:
    """Whether Hydra only prints information, such as for `--cfg job`, and runs nothing."""
    return bool(flags.cfg or flags.info or flags.hydra_help or flags.shell_completion)


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
        with _explained(flags.overrides), _help_of_any_type():
            _run_hydra(shown, get_args_parser(), _run_nothing, str(config.conf_dir()), _MAIN_CONFIG)
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
