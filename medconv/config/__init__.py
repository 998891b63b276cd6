"""The config schema, Hydra composition, instantiation, and which classes a checkpoint may name."""

from medconv.config.instantiate import (
    arguments_as_keys,
    arguments_of,
    build,
    check_arguments,
    errors_with_key,
    iter_nodes,
)
from medconv.config.keys import Node
from medconv.config.run_config import data_of, from_plain, validate, with_derived
from medconv.config.schema import (
    DataConfig,
    Derived,
    InitConfig,
    PerfConfig,
    PlanConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
    conf_dir,
)
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
    "iter_nodes",
    "lists_to_tuples",
    "tuples_to_lists",
    "validate",
    "with_derived",
]
