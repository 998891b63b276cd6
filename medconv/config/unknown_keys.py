"""Keys that no config has: one error that names the nearest ones."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

from omegaconf import OmegaConf

from medconv.config.keys import Node, declared_keys
from medconv.config.schema import Derived, RunConfig, conf_dir
from medconv.config.template_words import same_here
from medconv.config.trainer_config import set_elsewhere
from medconv.config.value_types import as_text
from medconv.config.values import ConfigError, texts

_OF_THE_COMMAND = "ckpt_path"  # the same as run.resume
_DERIVED = re.compile(r"\$\{derived\.(\w+)")  # such as ${derived.num_channels}


def check_names(values: Mapping[str, Any]) -> None:
    """Check the names in a composed config: groups, keys at the top, keys of typed groups, and of `derived`.

    Args: values: as plain values, with their interpolations.
    Raises: ConfigError: unknown names, all in one message; a single value in place of a group; an argument
        of Lightning's Trainer that is set elsewhere.
    """
    groups = {entry.name for entry in fields(RunConfig)} - _single_keys()
    typed_groups = _typed_groups()
    problems = []
    for name, value in values.items():
        if name in groups:
            _check_group(name, value)
            if name in typed_groups and isinstance(value, Mapping):
                problems += _unknown_in_group(name, value, typed_groups[name])
        elif name not in _single_keys() and name != _OF_THE_COMMAND:
            problems.append(unknown_key(name))
    problems += _unknown_derived(values)
    if problems:
        raise ConfigError.of_all(problems)


def _unknown_derived(values: Mapping[str, Any]) -> list[str]:
    known = [entry.name for entry in fields(Derived)]
    return [
        f"{key}: there is no derived.{name}; derived has {', '.join(known)}"
        for group, value in values.items()
        for key, text in texts(value, group)
        for name in _DERIVED.findall(text)
        if name not in known
    ]


def _check_group(name: str, value: Any) -> None:
    is_interpolation = isinstance(value, str) and "${" in value
    if not isinstance(value, Mapping) and not is_interpolation:
        raise ConfigError(f"{name}={as_text(value)}: {name} is no single value; set one of its keys")


def unknown_key(key: str) -> str:
    """A message for a key that does not exist, with the nearest ones."""
    equivalent = same_here(key)
    if equivalent is not None:
        return f"there is no key {key}; {equivalent}"
    near = nearest(key, _known_names())
    hint = f"did you mean {' or '.join(near)}?" if near else "--cfg job prints all keys"
    return f"there is no key {key}; {hint}"


def nearest(key: str, names: Sequence[str]) -> list[str]:
    """The names most similar to a key; for a key of a group, no groups."""
    alike = [name for name in names if "." in name or "." not in key]
    return _abbreviated(key, alike) or difflib.get_close_matches(key, alike, n=3, cutoff=0.7)


def _abbreviated(key: str, names: Sequence[str]) -> list[str]:
    """The name that has the initials of a key's words, such as optimizer.lr of optimizer.learning_rate."""
    group, dot, words = key.rpartition(".")
    initials = "".join(word[:1] for word in words.split("_"))
    abbreviated = f"{group}{dot}{initials}"
    return [abbreviated] if len(initials) > 1 and abbreviated in names else []


def takes_new_keys(key: str) -> bool:
    """Whether a key is in a group whose keys depend on the chosen class, so that the user may add some."""
    group = key.partition(".")[0]
    return "." in key and group not in _typed_groups()


def _unknown_in_group(group: str, values: Mapping[str, Any], declared: set[str]) -> list[str]:
    problems = []
    for name in values:
        key = f"{group}.{name}"
        elsewhere = set_elsewhere(key)
        if elsewhere is not None:
            problems.append(elsewhere)
        # Lightning, which loads torch, is asked only for names that its option here does not have
        elif name not in declared and not (group == "trainer" and name in _trainer_arguments()):
            problems.append(unknown_key(key))
    return problems


def _single_keys() -> set[str]:
    """Keys at the top that are no groups, such as `seed`."""
    return {key.name for key in declared_keys(RunConfig) if "." not in key.name and key.kind != Node}


def _typed_groups() -> dict[str, set[str]]:
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
