"""medconv: training of medical-image CNNs with anatomy-aware convolutions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medconv.config.schema import list_options as list_options
    from medconv.evaluation.api import evaluate as evaluate
    from medconv.inference.api import load as load
    from medconv.training.api import compose as compose
    from medconv.training.api import prepare as prepare
    from medconv.training.api import train as train

__version__ = "0.2.0"

# Public name to its module. Torch takes seconds to import, so that a module is imported with its first use.
_MODULES = {
    "compose": "medconv.training.api",
    "evaluate": "medconv.evaluation.api",
    "list_options": "medconv.config.schema",
    "load": "medconv.inference.api",
    "prepare": "medconv.training.api",
    "train": "medconv.training.api",
}
__all__ = ["compose", "evaluate", "list_options", "load", "prepare", "train"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'medconv' has no attribute {name!r}")
    try:
        module = import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(
            f"medconv.{name} needs the package {package}: pip install medconv, without --no-deps; "
            "medconv.convs needs torch alone",
            name=error.name,
        ) from error
    value = getattr(module, name)
    # The next access finds it here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
