"""From a composed config to a `RunConfig`: checked, then with every value filled in; and back from a file."""

import re
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from typing import Any

from omegaconf import MISSING, Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medconv.config.instantiate import check_classes
from medconv.config.keys import Key, Node, declared_keys
from medconv.config.schema import (
    GROUPS_WITH_CLASS,
    DataConfig,
    Derived,
    RunConfig,
    TrainerConfig,
    list_options,
    trainer_schema,
)
from medconv.config.unknown_keys import check_names
from medconv.config.values import ConfigError, as_text, in_words, is_text

# Texts that OmegaConf would read as interpolations or as missing, or we as placeholders of such texts
_READ_OTHERWISE = re.compile(r"\$|\?\?\?|\\ue000")  # in the text of a dict, which escapes the last
_PLACEHOLDER = "\ue000{}\ue001"  # characters without a meaning: Unicode leaves them to private use


def validate(composed: DictConfig) -> RunConfig:
    """The config of a run, with every value converted to its type; nodes keep their interpolations.

    Raises:
        ConfigError: unknown keys; values of a wrong type or outside of what is declared, all in one message;
            a `_target_` that cannot be imported, or an argument of a wrong type.
        omegaconf.errors.OmegaConfBaseException: an interpolation of a key that does not exist.
    """
    values: Any = OmegaConf.to_container(composed, resolve=False)
    # names, types and ranges come first: they need no class, whose import takes seconds. `Composer` checks
    # names before it imports the user's packages, too; configs from Hydra's own `compose` only come by here
    check_names(values)
    keys = list(declared_keys(RunConfig))
    _check_complete(values, keys)
    problems: list[str] = []
    try:
        typed = _typed(values)
    except OmegaConfBaseException:
        typed, problems = _without_wrong_types(values)
    frozen: dict[str, Any] = {}
    for name in [each for each in typed if each != "derived"]:
        value = typed[name]
        if OmegaConf.is_config(value):
            # a frozen dataclass for a typed group; for others plain values with their interpolations
            is_typed = OmegaConf.get_type(value) is not dict
            value = OmegaConf.to_object(value) if is_typed else OmegaConf.to_container(value, resolve=False)
        frozen[name] = value
    config = RunConfig(**frozen)
    # Lightning's further arguments have no range here
    for key in keys:
        group, _, name = key.name.rpartition(".")
        raw = (values.get(group, {}) if group else values).get(name)
        lost = [item for item in (raw if isinstance(raw, list) else [raw]) if isinstance(item, (bool, float))]
        if lost and is_text(key.kind):  # YAML read a number, whose spelling is lost: 1e5 as 100000.0
            expected = in_words(key.kind)
            problems.append(f"{key.name} must be {expected}, got {as_text(lost[0])}; write it in quotes")
        problem = key.problem(getattr(getattr(config, group) if group else config, name))
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigError.of_all(problems)
    for group in (*GROUPS_WITH_CLASS, "trainer"):
        node = OmegaConf.to_container(typed[group], resolve=False)
        check_classes(node, group)
    return config


def _check_complete(values: Node, keys: Sequence[Key]) -> None:
    """Raises: ConfigError: a group without defaults is missing, as `~loss` removes it."""
    for key in keys:
        group, _, name = key.name.rpartition(".")
        section = values.get(group, {}) if group else values
        if key.default == MISSING and group != "derived" and name not in section:
            missing = group or name
            options = ", ".join(list_options(missing))
            raise ConfigError(f"{missing}: every run needs one, without ~; choose one of {options}")


def data_of(composed: DictConfig) -> DataConfig:
    """Only `data` of a composed config, which may have groups of Hydra's own. Raises: as `validate`."""
    return OmegaConf.to_object(_typed({"data": composed.data}).data)  # type: ignore[return-value]


def with_derived(config: RunConfig, derived: Derived) -> RunConfig:
    """The same config with `derived` filled in, and every interpolation replaced.

    Texts of `derived`, such as class names, come from data files: an interpolation in them stays a text.
    Raises: omegaconf.errors.OmegaConfBaseException: an interpolation of a key that does not exist.
    """
    texts: list[str] = []
    known: Any = {name: value for name, value in asdict(derived).items() if value != MISSING}
    if _READ_OTHERWISE.search(str(known)):
        known = _hidden(known, texts)
    values = {**config.plain(), "derived": known}
    resolved = OmegaConf.to_object(_typed(values))
    return _shown(resolved, texts) if texts else resolved  # type: ignore[return-value]


def from_plain(values: Node) -> RunConfig:
    """The resolved config of a checkpoint, which may be malicious; inverse of `RunConfig.plain`.

    Its texts stay as they are, even interpolations. Keys of `trainer` that only another version of Lightning
    has are left out.
    Raises:
        OmegaConfBaseException: a missing key or a wrong type.
        LookupError, TypeError, AttributeError: it is no config.
    """
    declared = {entry.name for entry in fields(TrainerConfig)}
    trainer = {key: value for key, value in values["trainer"].items() if key in declared}
    texts: list[str] = []
    of_this_version = _hidden({**values, "trainer": trainer}, texts)
    typed = OmegaConf.merge(_schema(RunConfig()), of_this_version)
    return _shown(OmegaConf.to_object(typed), texts)  # type: ignore[no-any-return]


def _hidden(value: Any, texts: list[str]) -> Any:
    """A copy of nested plain values with a placeholder for each text that OmegaConf would read as an
    interpolation or as missing. Args: texts: gets these texts.
    """
    if isinstance(value, dict):
        return {name: _hidden(child, texts) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(child, texts) for child in value]
    if not isinstance(value, str) or not re.search(rf"\$|^\?\?\?$|{_PLACEHOLDER[0]}", value):
        return value
    texts.append(value)
    return _PLACEHOLDER.format(len(texts) - 1)


def _shown(value: Any, texts: Sequence[str]) -> Any:
    """A copy with the texts in place of their placeholders, also of those inside longer texts."""
    if isinstance(value, dict):
        return {name: _shown(child, texts) for name, child in value.items()}
    if isinstance(value, list):
        return [_shown(child, texts) for child in value]
    if is_dataclass(value) and not isinstance(value, type):
        changes = {entry.name: _shown(getattr(value, entry.name), texts) for entry in fields(value)}
        return replace(value, **changes)
    if isinstance(value, str):
        pattern = _PLACEHOLDER.format(r"(\d+)")
        return re.sub(pattern, lambda match: texts[int(match[1])], value)
    return value


def _without_wrong_types(values: Node) -> tuple[Any, list[str]]:
    """As `_typed`, where values have a wrong type: such keys keep their defaults; and a message for each.

    Raises: OmegaConfBaseException: none has; another error, such as an interpolation that cannot be read.
    """
    wrong_types = _wrong_types(values)
    remaining = {**values}
    for name in wrong_types:
        group, _, leaf = name.rpartition(".")
        if group:
            remaining[group] = {key: value for key, value in remaining[group].items() if key != leaf}
        else:
            del remaining[leaf]
    return _typed(remaining), list(wrong_types.values())


def _wrong_types(values: Node) -> dict[str, str]:
    """Key to message. OmegaConf stops at the first wrong value; here each key is tried alone."""
    from lightning import Trainer  # loads torch, which printing a config does not need

    schema = _schema(RunConfig(trainer=trainer_schema(Trainer)()))
    OmegaConf.set_readonly(schema, False)
    problems = {}
    for key in declared_keys(RunConfig, trainer=trainer_schema(Trainer)):
        group, _, name = key.name.rpartition(".")
        section = values.get(group, {}) if group else values
        if name not in section or key.kind == Node:  # a node has no type inside
            continue
        problem = key.problem(section[name])
        if problem is not None and not _can_set(schema[group] if group else schema, name, section[name]):
            problems[key.name] = problem
    return problems


def _can_set(section: DictConfig, name: str, value: Any) -> bool:
    """Whether OmegaConf can convert a value to the type of its key; sets it."""
    try:
        section[name] = value
    except OmegaConfBaseException:
        return False
    return True


def _typed(values: Any) -> Any:
    """The values in OmegaConf's nodes of their types. Raises: OmegaConfBaseException: a wrong type."""
    return OmegaConf.merge(_schema_of_runs(), values)


@cache
def _schema_of_runs() -> DictConfig:
    """The schema with Lightning's arguments, never changed: making it takes as long as filling in a copy."""
    from lightning import Trainer  # loads torch, which printing a config does not need

    return _schema(RunConfig(trainer=trainer_schema(Trainer)()))


def _schema(config: RunConfig) -> DictConfig:
    """The config, with its values as defaults, as a schema that OmegaConf lets be filled in although the
    classes are frozen.
    """
    schema: DictConfig = OmegaConf.structured(config)
    for entry in fields(config):
        node = schema._get_node(entry.name)
        if isinstance(node, Container):
            OmegaConf.set_readonly(node, False)
    return schema
