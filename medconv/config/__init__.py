"""The config schema, Hydra composition, instantiation, and which classes a checkpoint may name."""

from medconv.config.argument_keys import arguments_as_keys
from medconv.config.classes import arguments_of, check_arguments
from medconv.config.data_config import DataConfig
from medconv.config.instantiate import build, errors_with_key, iter_targets
from medconv.config.keys import Node
from medconv.config.run_config import data_of, from_plain, resolve, validate
from medconv.config.schema import Derived, InitConfig, PerfConfig, PlanConfig, RunConfig, TaskConfig, conf_dir
from medconv.config.trainer_config import TrainerConfig
from medconv.config.values import (
    ConfigError,
    dotted_keys,
    duration_seconds,
    flatten,
    lists_to_tuples,
    tuples_to_lists,
)

__all__ = [
    "ConfigError",
    "DataConfig",
    "Derived",
    "InitConfig",
    "Node",
    "PerfConfig",
    "PlanConfig",
    "RunConfig",
    "TaskConfig",
    "TrainerConfig",
    "arguments_as_keys",
    "arguments_of",
    "build",
    "check_arguments",
    "conf_dir",
    "data_of",
    "dotted_keys",
    "duration_seconds",
    "errors_with_key",
    "flatten",
    "from_plain",
    "iter_targets",
    "lists_to_tuples",
    "resolve",
    "tuples_to_lists",
    "validate",
]
