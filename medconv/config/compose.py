"""From a command line to a config by Hydra; `train` and `preprocess` share it."""

import argparse
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from medconv import config
from medconv.config.instantiate import keys_not_taken, search_current_folder
from medconv.config.run_config import place_elsewhere

_OURS = {"hydra/launcher": ("basic", "slurm"), "hydra/sweeper": ("basic", "optuna")}
_OF_OUR_NETWORK = "smooth"  # the conv of conf/model/customconv.yaml
_WITH_OTHER_CLASSES = ("model", "conv", "loss", "optimizer", "scheduler")
_OF_BUILDING = {"conv": ("where", "share")}  # read by `build_network`
_FOLDERS = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")
_LEFT_OUT = {  # loggers that other templates of Lightning have
    "comet": "Offline, it writes no file",
    "neptune": "Lightning has none any more",
    "aim": "It needs pkg_resources, which setuptools has no more",
}
log = logging.getLogger(__name__)


def run_with_config(job: Callable[[DictConfig, Any], None], arguments: Sequence[str]) -> None:
    """Compose the config of these arguments and call `job` with it and Hydra's own settings.

    A sweep calls `job` once per combination. An argument that only asks Hydra for information, such as
    `--cfg job`, does not call it.
    Raises: ConfigError: a key that does not exist. Any error of Hydra or `job`.
    """

    @hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="train")
    def one(composed_config: DictConfig) -> None:
        settings = HydraConfig.get()
        if settings.mode == RunMode.RUN:
            sys.argv[:] = full_argv  # Lightning starts the run's other processes with it
        _fit_classes(composed_config, settings)
        job(composed_config, settings)

    _check_hydra_settings(arguments)
    # Hydra then raises its errors instead of printing them; `guard` prints them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    full_argv = sys.argv[:]
    try:
        sys.argv[1:] = map(_escaped, arguments)  # Hydra reads the arguments there and knows no subcommands
        with _help_of_any_type():
            one()
    except ConfigCompositionException as error:
        raise _explained(error, arguments) from error
    except OverrideParseException as error:
        how = "write KEY=VALUE, and a value with spaces, commas, brackets or other special characters as"
        raise config.ConfigError(f"cannot read {error.override}: {how} 'KEY=\"VALUE\"'") from error
    finally:
        sys.argv[:] = full_argv


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


def _check_hydra_settings(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a setting of Hydra's without effect, or a launcher whose jobs would not train."""
    error = next((text for argument in arguments if (text := _hydra_error(argument))), "")
    if not error:
        return
    from medconv.utils import cluster  # loads torch, which printing a config does not need

    if cluster.is_first():  # Lightning itself gives the other ranks such arguments
        raise config.ConfigError(error)


def _hydra_error(argument: str) -> str:
    key, equals, value = argument.lstrip("+").partition("=")
    ours = _OURS.get(key, (value,))
    if equals and value not in ours:
        return f"{argument}: medconv starts the jobs of a sweep itself; expected {key}={' or '.join(ours)}"
    if equals and key.startswith(_FOLDERS):
        return (
            f"{argument}: Hydra's folders are not used; run.dir=FOLDER is a run's folder, run.name=NAME "
            "makes it runs/NAME"
        )
    return ""


def _escaped(argument: str) -> str:
    """Paths, patterns with `{id}` and regular expressions as they stand: Hydra reads braces and parentheses,
    and no letters but ASCII's."""
    key, equals, value = argument.partition("=")
    if not equals or argument.startswith("-") or "'" in value or '"' in value:
        return argument
    if key == "data.group_pattern" and value != "null":
        return f"{key}='{value}'"
    if re.fullmatch(r"data\.(images|labels)(\.\w+)?", key.lstrip("+")):
        # Hydra takes a # in quotes alone, such as of scans/{id}#b=50 or rs.dcm#roi=heart;lung
        quoted = re.sub(r"(?:\{id\}|[^,:{}])*#[^,{}]*", r"'\g<0>'", value)
        plain = re.compile(r"'[^']*'|(?<!\\)\{id\}")
        argument = f"{key}=" + plain.sub(lambda m: m[0] if m[0][0] == "'" else r"\{id\}", quoted)
    if re.search(r"^(\[|{)|[,$]|^\w+\(", value.replace("{id}", "")) or _is_readable(argument):
        return argument
    if value.startswith("~"):  # shells leave it in KEY=~/data
        value = str(Path(value).expanduser())
    return f"{key}='{value}'"


def _is_readable(argument: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([argument])
    except OverrideParseException:
        return False
    return True


def _fit_classes(composed_config: DictConfig, settings: Any) -> None:
    """Find the classes that the command line names. A class in the place of an option's gets no keys of the
    option that it lacks; for `model` convolutions stay as they are unless a `conv` is asked for."""
    # as they were typed: Hydra's list would fill in their interpolations
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    given = dict(str(override).lstrip("+").partition("=")[::2] for override in overrides or ())
    for key, target in given.items():
        if key.endswith("._target_"):
            search_current_folder(target)
    choices = settings.runtime.choices
    with open_dict(composed_config), read_write(settings):
        for group in _WITH_OTHER_CLASSES:
            if group in composed_config and group in choices:
                _leave_out(composed_config[group], group, choices[group], given)
        target = given.get("model._target_", "medconv.")
        asked = any(key == "conv" or key.startswith("conv.") for key in given)
        if choices.get("conv") == _OF_OUR_NETWORK and not asked and not target.startswith("medconv."):
            composed_config.conv = OmegaConf.load(config.conf_dir() / "conv" / "none.yaml")
            choices.conv = "none"
            log.info(
                "conv=none: %s keeps its first weights; conv=%s would draw others", target, _OF_OUR_NETWORK
            )


def _leave_out(node: Any, group: str, choice: str, given: Mapping[str, str]) -> None:
    """Leave out the keys of a group's option that the class in the place of its own has no argument for.

    Args: given: what the command line sets; it and an experiment keep their keys, so that wrong ones fail.
    """
    file = config.conf_dir() / group / f"{choice}.yaml"
    option: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    named = f"{group}._target_" in given
    if not OmegaConf.is_dict(node) or not (named or option.get("_target_", "") != _target(node)):
        return
    values: Any = OmegaConf.to_container(node, resolve=False)
    for key in keys_not_taken(node):
        is_default = values[key] == option.get(key, "") or (named and group == "model")
        if is_default and f"{group}.{key}" not in given and key not in _OF_BUILDING.get(group, ()):
            del node[key]
            log.info("%s.%s is left out: %s has no such argument", group, key, node["_target_"])


def _target(node: Any) -> Any:
    try:
        return node.get("_target_")
    except OmegaConfBaseException:  # an interpolation that only the data fills in
        return None


def hydra_flags(arguments: Sequence[str], command: str) -> argparse.Namespace:
    """The arguments, parsed by Hydra's own parser. Raises: ConfigError: Hydra has no such flag."""
    with _help_of_any_type():
        parser = get_args_parser()
    try:
        parser.exit_on_error = False
        found, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise config.ConfigError(f"{error}; flags: {command} --help") from error
    if unknown:
        is_key = not unknown[0].startswith("-")
        what = (
            f"{unknown[0]} must stand beside the other keys" if is_key else f"there is no flag {unknown[0]}"
        )
        raise config.ConfigError(
            f"{what}; keys are written as in trainer.max_steps=20, all before or all after flags; "
            f"flags: {command} --help"
        )
    return found


def only_shows(flags: argparse.Namespace) -> bool:
    """Whether Hydra only prints information, such as for `--cfg job`, and runs nothing."""
    return bool(flags.cfg or flags.info or flags.hydra_help or flags.shell_completion)


def _explained(error: ConfigCompositionException, arguments: Sequence[str]) -> Exception:
    """For an unknown key, an error that names the nearest keys; any other error unchanged."""
    if "'BasicSweeperConf'" in str(error):
        return config.ConfigError(
            "hparams_search=NAME is a search space for Optuna: add hydra/sweeper=optuna"
        )
    missing = re.search(r"Could not find '([\w/]+)/([\w-]+)'", str(error))
    if missing is not None and isinstance(error, MissingConfigException) and error.options:
        return _no_option(missing[1], missing[2], error.options)
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown is None:
        return error
    if elsewhere := place_elsewhere(unknown[1]):
        return config.ConfigError(elsewhere)
    chosen = [argument for argument in arguments if re.match(r"[\w/]+=[\w-]+$", argument)]
    # Only options that lie in our conf_dir: the user may have further ones.
    groups = [
        option for option in chosen if (config.conf_dir() / f"{option.replace('=', '/')}.yaml").is_file()
    ]
    with hydra.initialize_config_dir(str(config.conf_dir()), version_base="1.3"):
        keys = list(config.dotted_keys(OmegaConf.to_container(hydra.compose("train", groups), resolve=False)))
    if options := _options_with(unknown[1]):
        group, _, name = unknown[1].partition(".")
        return config.ConfigError(
            f"there is no key {unknown[1]} with this {group}; {name} is a key of {group}={', '.join(options)}"
        )
    near = difflib.get_close_matches(unknown[1], keys, n=3, cutoff=0.7)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; +{unknown[1]}=... adds a key"
    return config.ConfigError(f"there is no key {unknown[1]}{hint}")


def _no_option(group: str, name: str, options: Sequence[str]) -> Exception:
    near = difflib.get_close_matches(name, options, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    hint = f"{_LEFT_OUT[name]}. " if group == "logger" and name in _LEFT_OUT else hint
    return config.ConfigError(f"there is no {group}={name}; {hint}Options: {' '.join(options)}")


def resolved(composed: DictConfig) -> str:
    """The config as YAML without interpolations; what only the data tells is named so."""
    keys = {key.name: f"(from the data: {key.name})" for key in fields(config.Derived)}
    OmegaConf.set_struct(composed, False)
    filled = OmegaConf.merge(composed, {"derived": keys})
    return OmegaConf.to_yaml(filled, resolve=True)


def _options_with(key: str) -> list[str]:
    """Options of a key's group that have this key, such as bce for loss.class_weights."""
    group, _, name = key.partition(".")
    files = sorted((config.conf_dir() / group).glob("*.yaml"))
    return [file.stem for file in files if name in (OmegaConf.load(file) or {})]
