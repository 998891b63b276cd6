"""Errors of composing a config: settings without effect, and Hydra's errors with the nearest names.

Hydra has one type of error for most of them, so that its text and the arguments say which one it is.
"""

import difflib
import re
import sys
from collections.abc import Sequence

import hydra
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from medconv.config.schema import conf_dir
from medconv.config.template_words import same_here
from medconv.config.trainer_config import set_elsewhere
from medconv.config.unknown_keys import nearest, takes_new_keys
from medconv.config.values import ConfigError, dotted_keys

_CHOICES_OF_HYDRA = {"hydra/launcher": ("basic", "slurm"), "hydra/sweeper": ("basic", "optuna")}
_FOLDERS_OF_HYDRA = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")


def check_hydra_settings(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a setting of Hydra's without effect, or a launcher whose jobs would not train."""
    for argument in arguments:
        problem = _hydra_problem(argument)
        if problem:
            raise ConfigError(problem)


def _hydra_problem(argument: str) -> str:
    key, equals, value = argument.lstrip("+").partition("=")
    choices = _CHOICES_OF_HYDRA.get(key, (value,))
    if equals and value not in choices:
        return f"{argument}: medconv starts the jobs of a sweep itself; expected {key}={' or '.join(choices)}"
    if equals and key.startswith(_FOLDERS_OF_HYDRA):
        return (
            f"{argument}: Hydra's folders are not used; run.dir=FOLDER is a run's folder, run.name=NAME "
            "makes it runs/NAME"
        )
    # Hydra's parser calls functions in assertions (hydra issue 2570)
    if sys.flags.optimize and re.search(r"[({]", value):
        return (
            f"{argument}: Hydra cannot read such a value under python -O or PYTHONOPTIMIZE; start without it"
        )
    return ""


def explained(error: ConfigCompositionException, arguments: Sequence[str]) -> Exception:
    """For an unknown key or option an error that names the nearest ones; any other error unchanged."""
    text = str(error)
    # a search space sets keys of Optuna's sweeper, which Hydra's own one does not have
    if "'BasicSweeperConf'" in text:
        return ConfigError("hparams_search=NAME is a search space for Optuna: add hydra/sweeper=optuna")
    missing_option = re.search(r"Could not find '([\w/]+)/([\w-]+)'", text)
    if missing_option is not None and isinstance(error, MissingConfigException) and error.options:
        return _no_option(missing_option[1], missing_option[2], error.options)
    unknown_key = re.match(r"Could not override '([^']+)'", text)
    if unknown_key is not None:
        return _no_key(unknown_key[1], arguments)
    # Hydra would add a second option of a group that has one
    for argument in arguments:
        choice = argument.lstrip("+")
        group = choice.partition("=")[0]
        if choice != argument and (conf_dir() / group).is_dir():
            return ConfigError(f"{argument}: {group} has an option already; write {choice} to choose another")
    # Hydra's words for a key that stands in the config already: with a value, or with one of other keys
    if re.match("Could not append to config|Error merging override \\+", text):
        return _key_exists(text, arguments)
    return error


def _key_exists(text: str, arguments: Sequence[str]) -> ConfigError:
    known_keys = _keys_with(arguments)
    for argument in arguments:
        choice = argument.removeprefix("+")
        key = choice.partition("=")[0]
        if choice != argument and key in known_keys:
            return ConfigError(f"{argument}: there is a {key} already; write {choice} to change it")
    return ConfigError(text)


def _no_option(group: str, name: str, options: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(name, options, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    equivalent = same_here(f"{group}={name}")
    if equivalent is not None:
        hint = f"{equivalent}. "
    return ConfigError(f"there is no {group}={name}; {hint}Options: {' '.join(options)}")


def _no_key(key: str, arguments: Sequence[str]) -> ConfigError:
    elsewhere = set_elsewhere(key)
    if elsewhere is not None:
        return ConfigError(elsewhere)
    equivalent = same_here(key)
    if equivalent is not None:
        return ConfigError(f"there is no key {key}; {equivalent}")
    options = _options_with(key)
    if options:
        group, _, name = key.partition(".")
        return ConfigError(
            f"there is no key {key} with this {group}; {name} is a key of {group}={', '.join(options)}"
        )
    near = nearest(key, _keys_with(arguments))
    hint = "--cfg job prints all keys"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif takes_new_keys(key):
        hint = f"+{key}=... adds a key"
    return ConfigError(f"there is no key {key}; {hint}")


def _options_with(key: str) -> list[str]:
    """Options of a key's group that have this key, such as bce for loss.class_weights."""
    group, _, name = key.partition(".")
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return [file.stem for file in files if name in (OmegaConf.load(file) or {})]


def _keys_with(arguments: Sequence[str]) -> list[str]:
    """All keys of the config with the options that the arguments choose."""
    choices = [argument for argument in arguments if re.match(r"[\w/]+=[\w-]+$", argument)]
    # only options in our folder: the user may have further ones
    our_choices = [
        choice for choice in choices if (conf_dir() / f"{choice.replace('=', '/')}.yaml").is_file()
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("train", our_choices)
    return list(dotted_keys(OmegaConf.to_container(composed, resolve=False)))
