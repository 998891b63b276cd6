"""Plain values as YAML and back, as OmegaConf writes and reads it, but every `${...}` stays a text."""

from typing import Any

import yaml
from omegaconf._utils import get_omega_conf_dumper


def to_yaml(values: Any) -> str:
    """YAML of plain values, in their order; texts that YAML or Hydra would read as numbers are quoted."""
    text: str = yaml.dump(
        values, Dumper=get_omega_conf_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text


def from_yaml(text: str) -> Any:
    """Plain values of YAML text. Raises: yaml.YAMLError: it is not YAML."""
    return yaml.safe_load(text)
