"""The config schema, Hydra composition, instantiation, and which classes a checkpoint may name."""

from medconv.config.instantiate import build, errors_with_key, iter_targets
from medconv.config.schema import Config, conf_dir, resolve, validate
from medconv.config.values import (
    ConfigError,
    Values,
    dotted_keys,
    duration_seconds,
    flatten,
    lists_to_tuples,
    tuples_to_lists,
)

__all__ = [
    "Config",
    "ConfigError",
    "Values",
    "build",
    "conf_dir",
    "dotted_keys",
    "duration_seconds",
    "errors_with_key",
    "flatten",
    "iter_targets",
    "lists_to_tuples",
    "resolve",
    "tuples_to_lists",
    "validate",
]
