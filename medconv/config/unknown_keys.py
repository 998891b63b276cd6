"""Keys and options that do not exist: one error that names the nearest ones, or what does the same here.

Hydra has one type of error for most of them, so that its text and the arguments say which one it is.
"""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields
from functools import cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf

from medconv.config.instantiate import arguments_of, search_folder
from medconv.config.keys import Node, declared_keys
from medconv.config.schema import SHARED, DataConfig, Derived, RunConfig, conf_dir, set_elsewhere
from medconv.config.values import ConfigError, as_text, dotted_keys, texts

_KEYS = {
    "task_name": "run.name=NAME names the run's folder",
    "extras.print_config": "--cfg job prints the config, and each run writes config.yaml",
    "extras.ignore_warnings": "PYTHONWARNINGS=ignore before the command hides warnings",
    "extras.enforce_tags": "tags=[...] sets tags; medconv never prompts for them",
    "extras": "--cfg job prints the config; tags=[...] sets tags",
    "paths": "data.root is the dataset's folder, run.dir the run's",
    "ckpt_path": "run.resume=FILE resumes from a checkpoint",
    "train": "medconv train always trains; test=true also scores the test cases",
    "optimized_metric": "hydra/sweeper=optuna follows the metric of the task (docs/sweeps.md)",
}
_ANY_NAME = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# The last word of a key as it is called elsewhere, and our key.
_SYNONYMS = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "n_epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    "iterations": "trainer.max_steps",
    "time": "trainer.max_time",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "workers": "data.num_workers",
    "path": "data.root",
    "data_dir": "data.root",
    "output_dir": "run.dir",
    "name": "run.name",
}
_OPTIONS = {
    "logger=many_loggers": (
        "logger=wandb and logger=mlflow write TensorBoard, too, and every run writes metrics.csv; "
        "+logger.NAME._target_=CLASS adds one"
    ),
    "model=unet": "model=customconv is medconv's own U-Net, model=monai_unet that of MONAI",
    "logger=comet": "Offline, it writes no file",
    "logger=neptune": "Lightning no longer has it",
    "logger=aim": "It needs pkg_resources, which setuptools no longer has",
    "callbacks=early_stopping": "early_stopping=patience stops early",
    "callbacks=model_checkpoint": "every run writes best.ckpt and last.ckpt; run.checkpoint_interval",
    "debug=fdr": "debug=default is the shortest run; trainer.fast_dev_run=true is Lightning's",
}


def same_here(word: str) -> str | None:
    """What does the same here, as a sentence; None: the template has no such key or option.

    Args: word: a key such as `extras.print_config`, or an option such as `logger=many_loggers`.
    """
    group = word.partition(".")[0]
    return _OPTIONS.get(word) or _KEYS.get(word) or _KEYS.get(group)


_DERIVED = re.compile(r"\$\{derived\.(\w+)")  # such as ${derived.num_channels}


def check_names(values: Mapping[str, Any]) -> None:
    """Check the names in a composed config: groups, keys at the top, keys of typed groups, and of `derived`.

    Args: values: as plain values, with their interpolations.
    Raises: ConfigError: unknown names, all in one message; a single value in place of a group; an argument
        of Lightning's Trainer that is set elsewhere.
    """
    typed_groups = _typed_groups()
    keys = list(declared_keys(RunConfig))
    # keys at the top that are no groups, such as `seed`
    single_keys = {key.name for key in keys if "." not in key.name and key.kind != Node}
    groups = {entry.name for entry in fields(RunConfig)} - single_keys
    problems = []
    for name, value in values.items():
        if name in groups:
            is_interpolation = isinstance(value, str) and "${" in value
            if not isinstance(value, Mapping) and not is_interpolation:
                raise ConfigError(f"{name}={as_text(value)}: {name} is a group; set one of its keys")
            if name in typed_groups and isinstance(value, Mapping):
                unknown = [key for key in value if key not in typed_groups[name]]
                problems += [problem for key in unknown for problem in _unknown_in_group(name, key)]
        elif name not in single_keys:
            problems.append(unknown_key(name))
    problems += _unread_by_layout(values.get("data"))
    known = [entry.name for entry in fields(Derived)]
    problems += [
        f"{key}: there is no derived.{name}; derived has {', '.join(known)}"
        for group, value in values.items()
        for key, text in texts(value, group)
        for name in _DERIVED.findall(text)
        if name not in known
    ]
    if problems:
        raise ConfigError.of_all(problems)


# Keys of `data` that only some layouts take, by interpolation
_OF_LAYOUTS = (
    *("root", "images", "labels", "class_names", "modality", "entries"),
    *("path_column", "label_columns", "split_column", "group_column", "target_type"),
)


def _unread_by_layout(data: Any) -> Iterator[str]:
    """A message for each key of `data` that is set, but not read by the layout that was chosen."""
    layout = data.get("layout") if isinstance(data, Mapping) else None
    if not isinstance(layout, Mapping):
        return
    defaults = {entry.name: entry.default for entry in fields(DataConfig)}
    read = str(layout)
    if "${." in read:  # relative interpolations
        return
    for name in _OF_LAYOUTS:
        value = data.get(name)
        is_set = value is not None and value != defaults[name]
        of_raters = name == "root" and data.get("raters") is not None
        if is_set and not of_raters and f"data.{name}}}" not in read:
            yield (
                f"data.{name}={as_text(value)}: {layout.get('_target_')}, which reads this dataset, takes no "
                f"such key; it takes {', '.join(key for key in layout if key != '_target_')}"
            )


def unknown_key(key: str) -> str:
    """A message for a key that does not exist, with the nearest ones."""
    equivalent = same_here(key)
    if equivalent is not None:
        return f"there is no key {key}; {equivalent}"
    near = nearest(key, _known_names())
    hint = f"did you mean {' or '.join(near)}?" if near else "--cfg job prints all keys"
    return f"there is no key {key}; {hint}"


def nearest(key: str, names: Sequence[str]) -> list[str]:
    """The names that mean the same as a key's last word, or that end in it, or else are similar to the key.

    For a key of a group, no groups.
    """
    word = key.rpartition(".")[2]
    if word in _SYNONYMS:
        return [_SYNONYMS[word]]
    alike = [name for name in names if "." in name or "." not in key]
    in_other_groups = [name for name in alike if name.endswith(f".{word}")]
    return in_other_groups[:3] or difflib.get_close_matches(key, alike, n=3, cutoff=0.7)


def takes_new_keys(key: str) -> bool:
    """Whether a key is in a group whose keys depend on the chosen class, so that the user may add some."""
    group = key.partition(".")[0]
    return "." in key and group not in _typed_groups()


def _unknown_in_group(group: str, name: str) -> list[str]:
    """What is wrong with a key that a typed group does not declare."""
    key = f"{group}.{name}"
    elsewhere = set_elsewhere(key)
    if elsewhere is not None:
        return [elsewhere]
    # Lightning, which loads torch, is asked only for names that its option here does not have
    if group == "trainer" and name in _trainer_arguments():
        return []
    return [unknown_key(key)]


@cache
def _typed_groups() -> Mapping[str, Set[str]]:
    """Each typed group, such as `data`, with the names of its keys."""
    groups: dict[str, set[str]] = {}
    for key in declared_keys(RunConfig):
        group, _, name = key.name.rpartition(".")
        if group:
            groups.setdefault(group, set()).add(name)
    # the option lists Lightning's arguments, so that their names need no import of Lightning
    options = OmegaConf.load(conf_dir() / "trainer/default.yaml")
    groups["trainer"] |= {str(name) for name in options}
    return groups


def _known_names() -> list[str]:
    names = [entry.name for entry in fields(RunConfig)]
    for group, keys in _typed_groups().items():
        names += [f"{group}.{name}" for name in sorted(keys)]
    return names


def _trainer_arguments() -> set[str]:
    """Those of this version of Lightning, which may be another than `conf/trainer/default.yaml` is for."""
    from lightning import Trainer  # loads torch, which printing a config does not need

    return set(signature(Trainer).parameters)


_CHOICES_OF_HYDRA = {
    "hydra/launcher": ("basic", "slurm", "pbs", "sge", "lsf"),
    "hydra/sweeper": ("basic", "optuna"),
}
_FOLDERS_OF_HYDRA = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")


def check_hydra_settings(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a setting of Hydra's without effect, or a launcher whose jobs would not train."""
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        choices = _CHOICES_OF_HYDRA.get(key, (value,))
        if equals and value not in choices:
            expected = f"{key}={' or '.join(choices)}"
            raise ConfigError(f"{argument}: medconv starts the jobs of a sweep itself; expected {expected}")
        if equals and key.startswith(_FOLDERS_OF_HYDRA):
            raise ConfigError(
                f"{argument}: Hydra's folders are not used; run.dir=FOLDER is a run's folder, run.name=NAME "
                "makes it runs/NAME"
            )
        # Hydra's parser calls functions in assertions (hydra issue 2570)
        if sys.flags.optimize and re.search(r"[({]", value):
            raise ConfigError(
                f"{argument}: Hydra cannot read such a value under python -O or PYTHONOPTIMIZE; start "
                "without it"
            )


def check_not_of_a_sweep(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a launcher or a sweeper, which a single run would ignore."""
    for argument in arguments:
        if re.match(r"\+*hydra[./](launcher|sweeper)\b", argument):
            raise ConfigError(
                f"{argument}: is for a sweep, which -m starts; without -m a run trains here, once"
            )


def with_nearest(error: ConfigCompositionException, arguments: Sequence[str]) -> Exception:
    """For an unknown key or option an error that names the nearest ones; any other error unchanged."""
    text = str(error)
    # a search space sets keys of Optuna's sweeper, which Hydra's own one does not have
    if "'BasicSweeperConf'" in text:
        return ConfigError("hparams_search=NAME is a search space for Optuna: add hydra/sweeper=optuna")
    missing_option = re.search(r"Could not find '([\w/]+)/([\w-]+)'", text)
    if missing_option is not None and isinstance(error, MissingConfigException) and error.options:
        options = [name for name in error.options if name != SHARED]
        return _no_option(missing_option[1], missing_option[2], options)
    unknown_key = re.match(r"Could not override '([^']+)'", text)
    if unknown_key is not None:
        return _no_key(unknown_key[1], arguments)
    several_values = re.match(r"(?m)Ambiguous value for argument '([\w./@]+=.+)'$", text)
    if several_values is not None:
        key, _, value = several_values[1].replace("'", "").partition("=")
        return ConfigError(
            f"{key}={value}: several values; for a sweep over them add -m, for a list write {key}=[{value}], "
            f"for one text \"{key}='{value}'\""
        )
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
    known_keys = list(dotted_keys(_config_with(arguments)))
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
        new = f", or write +{key}=..." if takes_new_keys(key) else ""
        return ConfigError(
            f"there is no key {key} with this {group}; {name} is a key of {group}={', '.join(options)}{new}"
        )
    config = _config_with(arguments)
    near = nearest(key, list(dotted_keys(config)))
    hint = "--cfg job prints all keys"
    if takes_new_keys(key):
        hint = f"+{key}=... adds an argument that the class accepts"
        group, _, name = key.partition(".")
        typed = [argument.partition("=")[2] for argument in arguments if f"{group}._target_=" in argument]
        target = str((typed or [config.get(group, {}).get("_target_")])[-1])
        parameters = _parameters_of(target)
        names = [each for each, parameter in parameters.items() if parameter.kind not in _ANY_NAME]
        if name in names:
            return ConfigError(f"there is no key {key} yet; +{key}=... sets this argument of the class")
        if names == list(parameters):
            hint = f"{target.rpartition('.')[2]} takes {', '.join(names)}"
        near = near or [f"+{group}.{each}" for each in difflib.get_close_matches(name, names, n=3)]
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    return ConfigError(f"there is no key {key}; {hint}")


def _parameters_of(target: str) -> Mapping[str, Parameter]:
    """A class's arguments, none if it cannot be imported; that takes seconds, for which an error has time."""
    search_folder(target, Path.cwd())
    return arguments_of(target) or {"kwargs": Parameter("kwargs", Parameter.VAR_KEYWORD)}


def _options_with(key: str) -> list[str]:
    """Options of a key's group that have this key, such as bce for loss.class_weights."""
    group, _, name = key.partition(".")
    if name.startswith("layout."):  # arguments of many layouts have the same names
        return []
    files = sorted((conf_dir() / group).glob("*.yaml"))
    contents = {file.stem: OmegaConf.to_container(OmegaConf.load(file)) for file in files}
    return [option for option, content in contents.items() if name in dotted_keys(content)]


def _config_with(arguments: Sequence[str]) -> dict[str, Any]:
    """The config with the options that the arguments choose, its interpolations as they stand."""
    choices = [argument for argument in arguments if re.match(r"[\w/]+=[\w-]+$", argument)]
    # only options in our folder: the user may have further ones
    our_choices = [
        choice for choice in choices if (conf_dir() / f"{choice.replace('=', '/')}.yaml").is_file()
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("train", our_choices)
    values: Any = OmegaConf.to_container(composed, resolve=False)
    return dict(values)
