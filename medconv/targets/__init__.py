"""What a network predicts: label maps, regions, multiclass, multilabel, regression. A module here that
defines a kind of targets is found by its being here.
"""

from importlib import import_module
from pkgutil import iter_modules

from medconv.targets.base import KINDS, Targets

for module in iter_modules(__path__, f"{__name__}."):
    import_module(module.name)

__all__ = ["KINDS", "Targets"]
