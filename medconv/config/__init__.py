"""The config schema, Hydra composition, instantiation, and which classes a checkpoint may name."""

from medconv.config.instantiate import build, naming, plain, targets, tuples
from medconv.config.schema import Config, ConfigError, checked, conf_dir, flat, keys, resolved, seconds

__all__ = [
    "Config",
    "ConfigError",
    "build",
    "checked",
    "conf_dir",
    "flat",
    "keys",
    "naming",
    "plain",
    "resolved",
    "seconds",
    "targets",
    "tuples",
]
