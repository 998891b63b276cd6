"""Classes in the place of an option's own: which of the option's keys they keep.

An option such as `conf/model/customconv.yaml` is written for one class. `model._target_=CLASS` names another
one, for which values of ours may have no meaning, or a different one.
"""

import logging
from collections.abc import Mapping
from inspect import Parameter, isclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from medconv.config.classes import arguments_of, class_of
from medconv.config.schema import GROUPS_WITH_CLASS, conf_dir

_CONV_OF_OUR_NETWORKS = "smooth"  # of conf/model/customconv.yaml
# keys that are no arguments of the class
_READ_ELSEWHERE = {"conv": ("where", "share")}
# planned for our networks: MONAI's have arguments of these names and other forms
_PLANNED = tuple(f"${{derived.{name}}}" for name in ("channels", "strides", "kernel_sizes", "stage_strides"))

log = logging.getLogger(__name__)


def fit_classes(composed: DictConfig, settings: Any) -> None:
    """Adapt a composed config to classes that replace those of the chosen options.

    Of an option's keys such a class keeps those that it can use, see `_is_usable`. For `model`, convolutions
    stay as they are unless a `conv` is asked for or the network declares our own as its `default_conv`.

    Args: settings: Hydra's own.
    """
    # as they were typed: Hydra's list would fill in their interpolations
    overrides = OmegaConf.to_container(settings.overrides.task, resolve=False)
    typed: dict[str, str] = {}
    for override in overrides or ():
        key, _, value = str(override).lstrip("+").partition("=")
        typed[key] = value
    choices = settings.runtime.choices
    with open_dict(composed), read_write(settings):
        for group in GROUPS_WITH_CLASS:
            if group in composed and group in choices:
                _leave_out(composed[group], group, choices[group], typed)
        # smooth kernels have first weights of their own, with which other networks were not tried
        if choices.get("conv") == _CONV_OF_OUR_NETWORKS and _keeps_its_convolutions(typed):
            composed.conv = OmegaConf.load(conf_dir() / "conv" / "none.yaml")
            choices.conv = "none"
            log.info(
                "conv=none: %s keeps its first weights; conv=%s would draw others",
                typed["model._target_"],
                _CONV_OF_OUR_NETWORKS,
            )


def _keeps_its_convolutions(typed: Mapping[str, str]) -> bool:
    """Whether the command line names a network that is not made for our convolutions, and no `conv`."""
    if "model._target_" not in typed or any(key.partition(".")[0] == "conv" for key in typed):
        return False
    network = class_of(typed["model._target_"])
    return getattr(network, "default_conv", None) != _CONV_OF_OUR_NETWORKS


def _leave_out(node: Any, group: str, choice: str, typed: Mapping[str, str]) -> None:
    """Leave out the keys of a group's option that the class in the place of its own cannot use.

    Args: typed: what the command line sets; it and an experiment keep their keys, so that wrong ones fail.
    """
    file = conf_dir() / group / f"{choice}.yaml"
    option: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    option_target = option.get("_target_", "")
    is_named = f"{group}._target_" in typed
    is_replaced = is_named or option_target != _target(node)
    if not OmegaConf.is_dict(node) or not is_replaced or node.get("_target_") is None:
        return
    values: Any = OmegaConf.to_container(node, resolve=False)
    target = str(values["_target_"])
    arguments = arguments_of(target)
    if arguments is None:
        return
    takes_the_same = _takes_the_same(target, str(option_target), option)
    dropped = []
    for key, value in values.items():
        # a network of the user's own gets no defaults of ours, whatever an option has made of them
        is_default = value == option.get(key, "") or (is_named and group == "model" and option)
        is_set = f"{group}.{key}" in typed or not is_default
        if key.startswith("_") or is_set or key in _READ_ELSEWHERE.get(group, ()):
            continue
        is_kept = (takes_the_same and key in arguments) or _is_usable(key, value, arguments)
        if not is_kept:
            del node[key]
            dropped.append(key)
    if dropped:
        log.info("%s: %s gets no %s of %s=%s", group, target, ", ".join(dropped), group, choice)


def _is_usable(key: str, value: Any, arguments: Mapping[str, Parameter]) -> bool:
    """Whether a class takes a value that was chosen for another class.

    It does if it cannot do without it, or if the value describes the data, such as the number of channels.
    For everything else it has defaults of its own.
    """
    if key not in arguments:
        return any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if arguments[key].default is Parameter.empty:
        return value is not None  # null stands for what only the option's own class works out
    is_interpolation = isinstance(value, str) and "${" in value
    return is_interpolation and value not in _PLANNED


def _takes_the_same(target: str, option_target: str, option: Mapping[str, Any]) -> bool:
    """Whether a class takes all keys of an option in the same meaning as the option's own class.

    It is a subclass, or its arguments have the same names and annotations.
    """
    replacement = class_of(target)
    original = class_of(option_target) if option_target else None
    if isclass(replacement) and isclass(original) and issubclass(replacement, original):
        return True
    original_arguments = arguments_of(option_target) if option_target else None
    arguments = arguments_of(target)
    if original_arguments is None or arguments is None:
        return False
    keys = [key for key in option if key in original_arguments]
    return all(
        key in arguments and arguments[key].annotation == original_arguments[key].annotation for key in keys
    )


def _target(node: Any) -> Any:
    try:
        return node.get("_target_")
    except OmegaConfBaseException:  # an interpolation that only the data fills in
        return None
