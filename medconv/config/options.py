"""Names of a config group's options: the YAML files of a folder of `conf/`."""

from fnmatch import fnmatchcase

from medconv.config.schema import conf_dir
from medconv.config.values import ConfigError

_SHARED = "base"  # what the options of a group share is no option itself
_OF_HYDRA = "hydra"  # launchers and sweepers


def groups() -> list[str]:
    """Names of the config groups, such as `model` and `conv`, sorted."""
    folders = [path for path in conf_dir().iterdir() if path.is_dir()]
    return sorted(folder.name for folder in folders if folder.name != _OF_HYDRA)


def list_options(group: str, pattern: str = "*") -> list[str]:
    """Names of a config group's options, sorted, such as `customconv` and `segresnet` of `model`.

    Args:
        group: such as `model`, `conv`, `loss`, `data`, `augmentation` or `optimizer`.
        pattern: only names that match this shell pattern, such as `*unet*`.
    Raises:
        ConfigError: there is no such group; names all groups.
    """
    if group not in groups():
        raise ConfigError(f"there is no config group {group!r}; expected one of {', '.join(groups())}")
    names = {file.stem for file in (conf_dir() / group).glob("*.yaml")}
    names.discard(_SHARED)
    return sorted(name for name in names if fnmatchcase(name, pattern))
