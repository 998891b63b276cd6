"""From a command line, or from Python, to configs by Hydra: the config of a run, or those of a sweep."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import configure_log
from hydra.errors import ConfigCompositionException, OverrideParseException, SearchPathException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from medconv import config
from medconv.config.instantiate import add_package, fit_classes, iter_nodes, search_folder
from medconv.config.keys import declared_keys
from medconv.config.schema import groups
from medconv.config.unknown_keys import check_hydra_settings, check_names, check_not_of_a_sweep, with_nearest
from medconv.config.values import NO_TEXT, ConfigError, is_text

MAIN_CONFIG = "train"
_PATTERN_KEY = r"data\.(images|labels)(\.\w+)?"
_TEXT_WITH_HASH = r"(?:\{id\}|[^,:{}])*#[^,{}]*"  # such as scans/{id}#b=50 or rs.dcm#roi=heart;lung
_QUOTED_OR_ID = re.compile(r"'[^']*'|(?<!\\)\{id\}")
_LIST_CHOICES_OR_CALL = r"^(\[|{)|[,$]|^\w+\("


def escaped(argument: str) -> str:
    """An argument with its value in quotes where Hydra would not read it as it stands.

    Hydra gives braces and parentheses a meaning, and knows no letters but ASCII's.
    """
    key, equals, value = argument.partition("=")
    if not equals or argument.startswith("-") or "'" in value or '"' in value:
        return argument
    if key in _groups() and NO_TEXT.fullmatch(value):
        # Hydra's defaults may have a group without an option, its overrides may not
        return f"~{key}" if value == "null" else f"{key}='{value}'"
    if key == "data.group_pattern" and value != "null":
        return f"{key}='{value}'"
    value = _as_texts(value, are_texts=key.lstrip("+") in _text_keys())
    argument = f"{key}={value}"
    if re.fullmatch(_PATTERN_KEY, key.lstrip("+")):
        argument = f"{key}={_escaped_pattern(value)}"
    if re.search(_LIST_CHOICES_OR_CALL, value.replace("{id}", "")):
        return argument
    try:
        OverridesParser.create().parse_overrides([argument])
    except OverrideParseException:
        if value.startswith("~"):  # shells leave it in KEY=~/data
            value = str(Path(value).expanduser())
        return f"{key}='{value}'"
    return argument


@cache
def _groups() -> frozenset[str]:
    return frozenset(groups())


@cache
def _text_keys() -> frozenset[str]:
    """Keys whose value is a text even if it looks like a number, such as a run named 1e5."""
    return frozenset(key.name for key in declared_keys(config.RunConfig) if is_text(key.kind))


def _as_texts(value: str, are_texts: bool) -> str:
    """A list, choices of a sweep or a single value, with quotes around what Hydra would not read as a text.

    Args: are_texts: numbers are, too.
    """
    has_parts = re.search(r"[{}()$]|.\[", value)  # lists in lists, calls, ...
    opening, inner, closing = ("[", value[1:-1], "]") if re.fullmatch(r"\[.*\]", value) else ("", value, "")
    items = []
    for item in inner.split(","):
        is_number = are_texts and NO_TEXT.fullmatch(item) and item != "null"
        has_other_letters = not item.isascii() and "," in value and not has_parts
        items.append(f"'{item.strip()}'" if is_number or has_other_letters else item)
    return f"{opening}{','.join(items)}{closing}"


def _escaped_pattern(value: str) -> str:
    """A pattern of file names: Hydra takes # in quotes alone, and `{id}` with a backslash."""
    quoted = re.sub(_TEXT_WITH_HASH, r"'\g<0>'", value)
    return _QUOTED_OR_ID.sub(lambda match: match[0] if match[0].startswith("'") else r"\{id\}", quoted)


# Texts that Hydra reads as they stand. Options of a group and class names need no quotes.
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
# Words that Hydra would read as another type.
_HYDRAS_WORDS = ("null", "true", "false", "inf", "nan")
# Hydra allows no quotes around the key of a dictionary.
_ESCAPED_IN_KEYS = re.compile(r"([\\()\[\]{}:=,\s])")


def is_key_value(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


def place_of_keys(arguments: Sequence[str]) -> slice:
    """Where the keys stand in arguments, among which Hydra wants them in a row; at the end without any."""
    places = [n for n, argument in enumerate(arguments) if is_key_value(argument)]
    return slice(places[0], places[-1] + 1) if places else slice(len(arguments), len(arguments))


def as_override(name: str, value: Any) -> str:
    """`KEY=VALUE` for a keyword argument.

    Args:
        name: a key with two underscores for each dot, such as `trainer__max_steps`; or a group.
        value: None, bool, int, float, str, path, or a list, tuple or dict of them.
    Raises:
        ConfigError: a value of another type; names the key.
    """
    key = name.replace("__", ".")
    return f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        # Not `repr`: that of a numpy number names its type.
        return str(value)
    if isinstance(value, (str, Path)):
        return _quoted(str(value))
    if isinstance(value, (list, tuple)):
        items = [_text(key, item) for item in value]
        return f"[{','.join(items)}]"
    if isinstance(value, Mapping):
        entries = []
        for entry, item in value.items():
            entry_key = _ESCAPED_IN_KEYS.sub(r"\\\1", str(entry))
            entries.append(f"{entry_key}:{_text(f'{key}.{entry}', item)}")
        return f"{{{','.join(entries)}}}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _text(key, value.item())  # a number of numpy or torch
    raise ConfigError(
        f"{key}: expected None, bool, a number, text, a path, or a list or dict of these, "
        f"got {type(value).__name__}"
    )


def _quoted(text: str) -> str:
    if text.startswith("~"):
        text = str(Path(text).expanduser())
    is_plain = _PLAIN.fullmatch(text) is not None
    if is_plain and text.lower() not in _HYDRAS_WORDS:
        return text
    return QuotedString(text, Quote.single).with_quotes()


@dataclass(frozen=True)
class Composed:
    """A composed config with its interpolations, which `config.validate` makes a `RunConfig`.

    Args:
        settings: Hydra's own, such as the overrides as they were typed.
        choices: group to option, such as `model` to `customconv`.
    """

    values: DictConfig
    settings: Any
    choices: Mapping[str, str]


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
        self._config_name = flags.config_name or MAIN_CONFIG
        folder = flags.config_path or str(config.conf_dir())
        search_path = create_automatic_config_search_path(__file__, None, folder)
        if flags.config_dir is not None:
            own = Path(flags.config_dir).absolute()
            if not own.is_dir():
                raise SearchPathException(f"Additional config directory '{own}' not found")
            search_path.prepend("command-line", f"file://{own}", SearchPathQuery(provider="schema"))
        self._hydra = Hydra("medconv", ConfigLoaderImpl(search_path))
        self.is_sweep = flags.multirun
        # Only something of the user's own sets `hydra.mode`, and to ask for it takes as long as to compose
        if flags.config_path or flags.config_name or flags.config_dir or "hydra" in str(self.overrides):
            # None: it is not set, or the config has an error, which `configs` raises
            mode = self._hydra.get_mode(self._config_name, self.overrides)
            self.is_sweep = flags.multirun or mode == RunMode.MULTIRUN

    def configs(self) -> list[Composed]:
        """The config of a run; of a sweep one for each combination of the overrides with several values."""
        if not self.is_sweep:
            check_not_of_a_sweep(self._typed)
            with explaining(self._typed):
                return [_checked(self._load(RunMode.RUN))]
        settings = self.sweep_settings
        overrides = [f"{key}={values}" for key, values in (settings.sweeper.get("params") or {}).items()]
        task: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        overrides += task
        with explaining(self._typed):
            parser = OverridesParser.create(config_loader=self._hydra.config_loader)
            found = _combinations(parser, overrides)
        return [self.job(combination) for combination in found]

    @property
    def sweep_settings(self) -> Any:
        """Hydra's settings of the whole sweep, such as its launcher and the overrides with all values."""
        return self._sweep.hydra

    @cached_property
    def _sweep(self) -> DictConfig:
        with explaining(self._typed):
            return self._load(RunMode.MULTIRUN)

    def job(self, overrides: Sequence[str]) -> Composed:
        """The config of a job of the sweep. Args: overrides: without several values."""
        overrides = [escaped(each) if each.endswith("=null") else each for each in overrides]
        with explaining(self._typed):
            return _checked(self._hydra.config_loader.load_sweep_config(self._sweep, overrides))

    def _load(self, mode: RunMode) -> DictConfig:
        overrides = [*self.overrides, f"hydra.mode={mode.name}"]
        composed = self._hydra.compose_config(self._config_name, overrides, mode, with_log_configuration=True)
        if composed.hydra.callbacks:
            raise config.ConfigError("hydra.callbacks has no effect: callbacks=NAME chooses Lightning's")
        return composed


def compose(arguments: Sequence[str]) -> list[Composed]:
    """The config of these arguments of `medconv train`, or those of a sweep. Raises: as `Composer`."""
    return Composer(hydra_flags(arguments, "medconv train")).configs()


def combinations(arguments: Sequence[str]) -> list[list[str]]:
    """Each combination of the values of `KEY=VALUE,VALUE`. Raises: ConfigError: one cannot be read."""
    with explaining(arguments):
        return _combinations(OverridesParser.create(), [escaped(argument) for argument in arguments])


def _combinations(parser: OverridesParser, overrides: Sequence[str]) -> list[list[str]]:
    (found,) = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
    return [list(combination) for combination in found]


@contextmanager
def explaining(arguments: Sequence[str]) -> Iterator[None]:
    """Inside, Hydra's errors name the nearest keys and options, or how a value is written."""
    try:
        yield
    except ConfigCompositionException as error:
        raise with_nearest(error, arguments) from error
    except OverrideParseException as error:
        how = "and a value with spaces, commas, brackets or other special characters as 'KEY=\"VALUE\"'"
        if any(argument.startswith("=") or argument.endswith("=") for argument in arguments):
            how = "without spaces around ="
        elif re.search(r"=\w+\([^)]*\bnull\b", error.override):  # Hydra's choice takes no null
            how = "and null among several values as KEY=null,VALUE"
        elif "{" in error.override:  # Hydra has no quotes for what stands before a colon
            how += "; words before a colon in {} have no quotes: those with ^, quotes or other letters than "
            how += "a to z go into a YAML file, see --config-dir"
        raise config.ConfigError(f"cannot read {error.override}: write KEY=VALUE, {how}") from error


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
    plain: Any = OmegaConf.to_container(values, resolve=False)
    if "${hydra:" in str(plain):
        _fill_in_hydras(values, whole)
        plain = OmegaConf.to_container(values, resolve=False)
    check_names(plain)
    # The folders of a user's own classes: the current one, and that of `--config-dir` with the one around it:
    # a package `mine` may hold its options, so that `--config-dir mine` and `mine.net.Net` belong together
    folders = [Path.cwd()]
    for source in settings.runtime.config_sources:
        if source.provider == "command-line":
            folder = Path(source.path).absolute()
            folders += [folder, folder.parent]
    for package in plain["run"].get("packages") or ():
        add_package(str(package), *folders)
    # before classes are imported, whether the command line or a YAML file names them
    for _, node in iter_nodes(plain, "config"):
        for folder in folders:
            search_folder(str(node["_target_"]), folder)
    fit_classes(values, settings)
    return Composed(values, settings, dict(settings.runtime.choices))


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


@contextmanager
def help_of_any_type() -> Iterator[None]:
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

    `only_shows` says whether Hydra only prints information, such as for `--cfg job`, and runs nothing.
    Args:
        command: for messages.
        packages: those of `--package`, which become `run.packages`, so that a run remembers them.
    Raises: ConfigError: Hydra has no such flag.
    """
    with help_of_any_type():
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
    flags.only_shows = bool(flags.cfg or flags.info or flags.hydra_help or flags.shell_completion)
    return flags
